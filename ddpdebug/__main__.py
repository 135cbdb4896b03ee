"""Entry point of `python -m ddpdebug`: the same as the command `ddpdebug`."""

from __future__ import annotations

import sys

from ddpdebug.commands import main

if __name__ == "__main__":
    status = main()
    if status:  # else it ends as a script does, which under `python -i` goes on at the prompt
        sys.exit(status)
