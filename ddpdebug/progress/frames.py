"""Where a thread is, in words: its phase, the user's line, and what kind of thing it blocks in. Torch-free.

Only frames are read, never their variables. A function of C has no frame: what a line of Python has called is read from
the source, at the place that the interpreter notes for each instruction.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

from ddpdebug.isolation.user_code import is_user_file, location

#: This package's files, wherever a checkout of somebody else's is called so too.
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
_MOST_FRAMES = 40
_MOST_CALL = 80
#: Kinds in which a thread waits for something in or around its own process, and so for no other rank.
OWN = frozenset({"lock", "queue", "socket", "file", "sleep", "process", "input", "debugger", "loader", "key"})
#: Words for each kind; `{}` is the call.
KINDS = {
    "lock": "waits for a lock",
    "queue": "waits for an item of a queue",
    "socket": "waits for the network",
    "file": "waits for a file or a pipe",
    "sleep": "sleeps",
    "process": "waits for another process",
    "input": "waits for input from a person",
    "debugger": "a debugger waits for a command",
    "loader": "waits for a worker of its DataLoader",
    "collective": "is in a collective",
    "backward": "is in backward",
    "key": "waits for a key in a store",
    "store": "meets the other ranks in the job's store",
}
#: Of a library's frame, by the end of its file's path: what a thread does there.
_FILES = (
    ("/torch/utils/data/dataloader.py", "loader"),
    ("/pdb.py", "debugger"),
    ("/bdb.py", "debugger"),
    ("/debugpy/", "debugger"),
    ("/torch/distributed/", "collective"),
    ("/torch/autograd/graph.py", "backward"),
    ("/threading.py", "lock"),
    ("/queue.py", "queue"),
    ("/multiprocessing/queues.py", "queue"),
    ("/multiprocessing/synchronize.py", "lock"),
    ("/multiprocessing/popen_fork.py", "process"),
    ("/multiprocessing/connection.py", "file"),
    ("/subprocess.py", "process"),
    ("/socket.py", "socket"),
    ("/ssl.py", "socket"),
    ("/selectors.py", "socket"),
    ("/asyncio/", "socket"),
    ("/concurrent/futures/", "lock"),
)
#: Of a call in the source, by the last name in it.
_CALLS = (
    (re.compile(r"\b(acquire|Lock|with .*[lL]ock)\b"), "lock"),
    (re.compile(r"\bsleep\b"), "sleep"),
    (re.compile(r"[sS]tore\w*\.(get|wait)\b"), "key"),
    (re.compile(r"\b(recv|recv_into|recvfrom|accept|connect|sendall|urlopen|getaddrinfo)\b"), "socket"),
    (re.compile(r"\b(input|stdin)\b"), "input"),
    (re.compile(r"\bbreakpoint\b"), "debugger"),
    (re.compile(r"\b(waitpid|wait3|wait4|system|communicate)\b"), "process"),
    (re.compile(r"\b(open|read|readline|readlines|readinto|write|fsync|flock|lockf|poll|select)\b"), "file"),
    (re.compile(r"(\bq|[qQ]ueue\w*)\.(get|put)\b"), "queue"),
    (re.compile(r"\b(get|put|join)\("), "queue"),
)
_PHASES = (
    ("/torch/utils/data/", "data"),
    ("/torch/autograd/", "backward"),
    ("/torch/_tensor.py", "backward"),
    ("/torch/optim/", "optimizer"),
    ("/torch/nn/modules/module.py", "forward"),
    ("/torch/nn/parallel/", "forward"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where a thread is.

    Args:
        place: the innermost of the user's lines.
        does: what that line calls, as the source has it.
        kind: of `KINDS`; empty where it may be computing.
        stack: innermost first, from the user's innermost line inwards and outwards.
    """

    phase: str = "script"
    place: str | None = None
    function: str = ""
    does: str = ""
    kind: str = ""
    stack: tuple[str, ...] = ()


def signature(frame: FrameType | None) -> int:
    """Return a number that changes as soon as any frame of a stack goes on."""
    return hash(tuple((id(f.f_code), f.f_lasti) for f in _outwards(frame)))


def look(frame: FrameType | None) -> At:
    """Return where a thread is, by its innermost frame."""
    frames = [f for f in _outwards(frame) if not f.f_code.co_filename.startswith(_OWN)]
    if not frames:
        return At()
    users = next((f for f in frames if is_user_file(f.f_code.co_filename)), None)
    inner = frames[: frames.index(users)] if users is not None else frames
    does = "" if users is None else _call(users)
    # what the user's line has called says more than what that waits with in the end
    phase, kind = _phase(inner, does), _kind(inner if users is None else inner[::-1], frames[0], does)
    stack = tuple(f"{location(f.f_code.co_filename, f.f_lineno or 0)} ({f.f_code.co_name})" for f in frames)
    if users is None:
        return At(phase=phase, kind=kind, stack=stack)
    place = location(users.f_code.co_filename, users.f_lineno or 0)
    return At(phase=phase, place=place, function=users.f_code.co_name, does=does, kind=kind, stack=stack)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    def walk() -> Iterator[FrameType]:
        current = frame
        while current is not None:
            yield current
            current = current.f_back

    return islice(walk(), _MOST_FRAMES)


def _phase(inner: list[FrameType], does: str) -> str:
    files = [f.f_code.co_filename for f in inner]
    for part, phase in _PHASES:
        if any(part in file for file in files):
            return phase
    if any("/torch/distributed/" in file for file in files):
        return "collective"
    return "backward" if does.endswith(".backward()") else "script"


def _kind(inner: list[FrameType], innermost: FrameType, does: str) -> str:
    files = [f.f_code.co_filename for f in inner]
    for part, kind in _FILES[:4]:  # these tell more than what they wait with
        if any(part in file for file in files):
            return kind
    call = does if not inner else _call(innermost)
    if any("/torch/distributed/" in file for file in files):
        return "store" if any(f.f_code.co_name in _MEETINGS for f in inner) else "collective"
    for file in files:
        for part, kind in _FILES:
            if part in file:
                return kind
    return next((kind for pattern, kind in _CALLS if pattern.search(call)), "")


#: Functions of torch's in which the ranks meet in the store.
_MEETINGS = frozenset({"_store_based_barrier", "init_process_group", "rendezvous", "_new_process_group_helper"})


def _call(frame: FrameType) -> str:
    """Return the call that a frame is in, as the source has it; the whole line where it is not known."""
    code, line = frame.f_code, frame.f_lineno or 0  # an instruction without a line has None
    text = linecache.getline(code.co_filename, line).strip()
    place = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if place is not None and None not in place and place[0] == place[1] == line:
        source = linecache.getline(code.co_filename, line).encode("utf-8", "replace")
        found = source[place[2] : place[3]].decode("utf-8", "replace").strip()
        text = found or text
    return text[:_MOST_CALL]
