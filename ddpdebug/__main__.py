"""`python -m ddpdebug` is `ddpdebug`."""

from __future__ import annotations

import sys

from ddpdebug.commands import main

if __name__ == "__main__":
    sys.exit(main())
