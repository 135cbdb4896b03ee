"""torchrun, with the exit statuses of the ranks written to a file.

`python -m ddpdebug.processes.torchrun FILE <torchrun's arguments>`.

The launcher's exit status is 1 whatever happened; a check must know whether a rank failed or was killed. A launcher
that the check itself ends, which it says by a file `OVER` beside FILE, prints no traceback: the verdict says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from ddpdebug.processes.launch import OVER


def main(argv: list[str]) -> int:
    """Run the launcher; write `{rank: exit status}` of the ranks that failed first to the file named by `argv[0]`."""
    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        statuses = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        Path(argv[0]).write_text(json.dumps(statuses), encoding="utf-8")
        return 1
    except SignalException:
        if not Path(argv[0]).with_name(OVER).exists():
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
