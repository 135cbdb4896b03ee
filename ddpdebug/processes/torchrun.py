"""torchrun for the ranks that ddpdebug starts: ends on request without a traceback of its own.

`python -m ddpdebug.processes.torchrun [--statuses FILE] <torchrun's arguments>`.

The launcher's exit status is 1 whatever happened; a check must know whether a rank failed or was killed, and finds the
exit statuses of the ranks in FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: The option that names the file of the exit statuses.
STATUSES = "--statuses"


def main(argv: list[str]) -> int:
    """Run the launcher; write `{rank: exit status}` of the ranks that failed first to the file named in `argv`."""
    statuses = Path(argv[1]) if argv[:1] == [STATUSES] else None
    try:
        from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - takes seconds, in which
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record  # noqa: PLC0415 - people
        from torch.distributed.run import parse_args, run  # noqa: PLC0415 - press Ctrl-C
    except KeyboardInterrupt:
        return 1
    try:
        if statuses is None:
            record(run)(parse_args(argv))
        else:
            run(parse_args(argv[2:]))
    except ChildFailedError as error:
        if statuses is None:
            raise
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        statuses.write_text(json.dumps(codes), encoding="utf-8")
        return 1
    except (SignalException, KeyboardInterrupt):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
