"""Stacks of a rank's test, parsed from the text of faulthandler. Torch-free."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
from typing import NamedTuple

#: Asks a rank where it is; one of the signals that nothing else uses.
WHERE_ARE_YOU = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 7
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_RUNNER = f"_pytest{os.sep}runner.py"
#: The machinery between pytest's runner and the test.
_MACHINERY = (os.sep + "_pytest" + os.sep, os.sep + "pluggy" + os.sep, os.path.dirname(__file__) + os.sep)  # noqa: PTH120
_NOT_USERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
#: Where a rank waits for its peers: in torch's collectives, and in the backward of DDP, whose waiting has no frame.
_WAITING = re.compile(r"/torch/distributed/|/torch/autograd/graph\.py$")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def stack_of_test(text: str) -> list[Frame]:
    """Return the frames of the thread that runs the test, innermost first, without those of pytest."""
    threads: list[list[Frame]] = [[]]
    for line in text.splitlines():
        if match := _FRAME.match(line):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
        elif "hread" in line:
            threads.append([])
    for frames in threads:
        if any(frame.file.endswith(_RUNNER) for frame in frames):
            return [frame for frame in frames if not any(part in frame.file for part in _MACHINERY)]
    return []


def waits_for_peers(text: str) -> bool:
    """Whether the rank's stack shows a wait for its peers, so that the cause lies with them."""
    return any(_WAITING.search(frame.file) for frame in stack_of_test(text))


def place(text: str, root: str) -> str:
    """Return the innermost line of the user's code, and the library function that this line calls."""
    frames = stack_of_test(text)
    users = [frame for frame in frames if not frame.file.startswith(_NOT_USERS)]
    if not users:
        return frames[-1].function if frames else "a place that it could not tell"
    first = users[0]
    shown = first._replace(file=os.path.relpath(first.file, root)) if first.file.startswith(root + os.sep) else first
    # the outermost foreign function is the one that the user's line calls
    called = [frame.function for frame in frames[: frames.index(first)] if frame.function != "wrapper"]
    return f"{shown}, inside {called[-1]}" if called else str(shown)


def text_of(text: str) -> str:
    """Return the test's stack as a section of a report, outermost frame first as in Python's tracebacks."""
    return "\n".join(f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(stack_of_test(text)))
