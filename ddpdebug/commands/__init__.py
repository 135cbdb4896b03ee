"""The command line: one file per command.

What runs a script in this process loads next to nothing before the script does: the line is read in a fork of it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ddpdebug.commands._rank import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; exceptions of a user's script pass through."""
    words = list(sys.argv[1:] if argv is None else argv)
    outcome = _read_aside(words) if _becomes_script(words) and "click" not in sys.modules else _read(words)
    if isinstance(outcome, int):
        return outcome
    from ddpdebug.commands._rank import carry_out  # noqa: PLC0415 - not for other commands

    return carry_out(outcome)


def _becomes_script(words: Sequence[str]) -> bool:
    """Whether a line may run a script in this process."""
    in_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return words[:1] == ["run"] or (words[:1] == ["check"] and in_rank)


def _read(words: Sequence[str]) -> int | Plan:
    """Read a line and do what it says, but for running a script here: return the plan for that, or an exit code."""
    from ddpdebug.commands._line import carry_out  # noqa: PLC0415 - loads click

    return carry_out(words)


def _read_aside(words: Sequence[str]) -> int | Plan:
    """Read a line in a process of its own, so that what this loads is not loaded here.

    The system takes it away at its end: who waits for a child counts what that has used as that of his children.
    """
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415 - built in
    import marshal  # noqa: PLC0415 - built in

    _flush()
    handler = _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    reading, writing = os.pipe()
    try:
        process = os.fork()
    except OSError:  # no more processes
        _signal.signal(_signal.SIGCHLD, handler)
        os.close(reading)
        os.close(writing)
        return _read(words)
    if process == 0:
        try:
            _signal.signal(_signal.SIGCHLD, handler)
            os.close(reading)
            done: Any = _read(words)
            _flush()
            with os.fdopen(writing, "wb") as file:
                file.write(marshal.dumps(done))
        except BaseException:  # noqa: BLE001 - the interpreter's own report, and nothing else of its end
            sys.excepthook(*sys.exc_info())
        finally:
            _flush()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    _await(process)
    _signal.signal(_signal.SIGCHLD, handler)
    outcome: int | Plan = marshal.loads(told) if told else 1  # noqa: S302 - written by ourselves
    return outcome


def _await(process: int) -> None:
    """Wait for the end of a child of which nothing is left then."""
    try:
        os.waitpid(process, 0)
    except ChildProcessError:
        return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
