"""The place of a thread in words: its phase, the user's line, and the kind of call that blocks it. Torch-free.

Only frames are read, never their variables. A function of C has no frame: what a line of Python has called is read from
the source, at the place that the interpreter notes for each instruction.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import NamedTuple

from ddpdebug import source_lines
from ddpdebug.isolation.user_code import is_user_file, location
from ddpdebug.progress.foreign_stack import Place

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
    "regex": "in a regular expression",
}
#: What makes one attempt with a regular expression, and has no memory to show for it: others find many in a long text.
_ATTEMPTS = frozenset({"fullmatch", "match", "search"})
#: Of a library's frame, by the end of its file's path: what a thread does there.
_FILES = (
    ("/torch/utils/data/dataloader.py", "loader"),
    ("/pdb.py", "debugger"),
    ("/bdb.py", "debugger"),
    ("/debugpy/", "debugger"),
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
#: Of a call in the source, by what it calls: the name, with what it is taken from, and a bracket.
_CALLS = (
    (re.compile(r"\b(acquire|Lock)\($|^with .*[lL]ock\b"), "lock"),
    (re.compile(r"\bsleep\($"), "sleep"),
    (re.compile(r"[sS]tore\w*\.(get|wait)\($"), "key"),
    (re.compile(r"\b(recv|recv_into|recvfrom|accept|connect|sendall|urlopen|getaddrinfo)\($"), "socket"),
    (re.compile(r"\binput\($|\bstdin(\.\w+\($|$)"), "input"),
    (re.compile(r"\bbreakpoint\($"), "debugger"),
    (re.compile(r"\b(waitpid|wait3|wait4|system|communicate)\($"), "process"),
    (re.compile(r"\b(open|read|readline|readlines|readinto|write|fsync|flock|lockf|poll|select)\($"), "file"),
    (re.compile(r"\b(get|put|join)\($"), "queue"),
)
#: Where torch's functions stand that ranks call together, and the functions that wait for others themselves.
_C10D = "/torch/distributed/distributed_c10d.py"
_TOGETHER = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
        "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
        "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
        "scatter_object_list", "send", "send_object_list",
    }
)  # fmt: skip
#: Of them, those that leave no trace in torch's record.
_UNRECORDED = frozenset({"monitored_barrier", "recv", "send"})
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
    """The place of a thread.

    Args:
        place: the innermost of the user's lines.
        does: what that line calls, as the source has it.
        kind: of `KINDS`; empty where it may be computing.
        unrecorded: it waits for other ranks in what torch's record of collectives does not show.
        among: a function of torch's for several ranks has been called, which may or may not wait for them.
        stack: innermost first, from the user's innermost line inwards and outwards.
    """

    phase: str = "script"
    place: str | None = None
    function: str = ""
    does: str = ""
    kind: str = ""
    stack: tuple[str, ...] = ()
    unrecorded: bool = False
    among: bool = False


class Frame(NamedTuple):
    """The data of a frame; the frame itself would keep a function's variables alive, and free them elsewhere."""

    code: CodeType
    instruction: int
    line: int  # 0 where the instruction has none

    @property
    def file(self) -> str:
        """The file of the frame's code."""
        return self.code.co_filename

    def words(self) -> str:
        """Return file, line and function."""
        return f"{location(self.file, self.line)} ({self.code.co_name})"


def take(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the frames of a stack, innermost first, at most 40."""
    found: list[Frame] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(Frame(frame.f_code, frame.f_lasti, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found)


def signature(stack: tuple[Frame, ...]) -> int:
    """Return a number that changes as soon as any frame of a stack advances."""
    return hash(tuple([(id(frame.code), frame.instruction) for frame in stack]))


def look(stack: tuple[Frame, ...], meetings: Collection[str] = ()) -> At:
    """Return the place of a thread.

    Args:
        meetings: functions of torch's in which ranks meet in the store.
    """
    frames = [frame for frame in stack if not frame.file.startswith(_OWN)]
    if not frames:
        return At()
    users = next((frame for frame in frames if is_user_file(frame.file)), None)
    inner = frames[: frames.index(users)] if users is not None else frames
    does = "" if users is None else _call(users)
    # what the user's line has called says more than what that waits with in the end
    told = inner if users is None else inner[::-1]
    kind = _kind(told, frames[0], meetings)
    here = At(
        phase=_phase(inner, does, kind),
        does=does,
        kind=kind,
        stack=tuple([frame.words() for frame in frames]),
        unrecorded=kind == "store" or any(_is_c10d(frame, _UNRECORDED) for frame in inner),
        among=any("/torch/distributed/" in frame.file for frame in inner),
    )
    if users is None:
        return here
    return replace(here, place=location(users.file, users.line), function=users.code.co_name)


def of_places(places: Sequence[Place]) -> At:
    """Return the place of a thread of another process, by its frames, innermost first; its phase stays unknown.

    Its kind is known where the innermost frame shows that it matches a regular expression.
    """
    frames = [place for place in places if "/ddpdebug/" not in place.file]
    users = next((place for place in frames if is_user_file(place.file)), None)
    stack = tuple([f"{location(place.file, place.line)} ({place.function})" for place in frames[:_MOST_FRAMES]])
    if users is None:
        return At(stack=stack, kind=_matching(places[0], "") if places else "")
    line = source_lines.getline(users.file, users.line)
    does = line.strip()
    if users.columns is not None:
        start, stop = users.columns
        does = line.encode("utf-8", "replace")[start:stop].decode("utf-8", "replace").strip() or does
    place = location(users.file, users.line)
    kind = _matching(places[0], does)
    return At(place=place, function=users.function, does=does[:_MOST_CALL], kind=kind, stack=stack)


def _phase(inner: list[Frame], does: str, kind: str) -> str:
    files = [frame.file for frame in inner]
    for part, phase in _PHASES:
        if any(part in file for file in files):
            return phase
    if kind in {"collective", "store"}:
        return "collective"
    return "backward" if does.endswith(".backward()") else "script"


def _kind(inner: list[Frame], innermost: Frame, meetings: Collection[str]) -> str:
    files = [frame.file for frame in inner]
    for part, kind in _FILES[:4]:  # these tell more than what they wait with
        if any(part in file for file in files):
            return kind
    if any("/torch/distributed/" in frame.file and frame.code.co_name in meetings for frame in inner):
        return "store"
    if any(_is_c10d(frame, _TOGETHER) for frame in inner):
        return "collective"
    for file in files:
        for part, kind in _FILES:
            if part in file:
                return kind
    called = _called(_source(innermost))
    return next((kind for pattern, kind in _CALLS if pattern.search(called)), "")


def _matching(innermost: Place, does: str) -> str:
    """Return "regex" where the innermost frame is in a function of C that makes one attempt to match.

    That is one of `re`'s functions, or the user's line that calls the method of a pattern, which has no frame of its
    own. Whether it is a pattern's is known where that is a variable of a module that this process has loaded as well.
    """
    if innermost.file == re.__file__:
        return "regex" if innermost.function in _ATTEMPTS else ""
    if not is_user_file(innermost.file):
        return ""
    name, _, method = _called(does).removesuffix("(").rpartition(".")
    if method not in _ATTEMPTS:
        return ""
    for module in tuple(sys.modules.values()):  # of other classes attributes may run code
        names = vars(module) if type(module) is ModuleType else {}
        if type(file := names.get("__file__")) is str and file == innermost.file:
            return "regex" if type(names.get(name)) is re.Pattern else ""
    return ""


def _is_c10d(frame: Frame, functions: Collection[str]) -> bool:
    return frame.code.co_name in functions and _C10D in frame.file


def _call(frame: Frame) -> str:
    """Return the call that a frame is in, at most 80 characters of it."""
    return _source(frame)[:_MOST_CALL]


def _source(frame: Frame) -> str:
    """Return the call that a frame is in, as the source has it; the whole line where it is not known."""
    text = source_lines.getline(frame.file, frame.line)
    place = next(islice(frame.code.co_positions(), frame.instruction // 2, None), None)
    if place is not None and None not in place and place[0] == place[1] == frame.line:
        source = text.encode("utf-8", "replace")
        part = source[place[2] : place[3]].decode("utf-8", "replace").strip()
        if "(" in part or not text.lstrip().startswith("with "):  # else what it enters, from Python 3.14 on
            text = part or text
    return text.strip()


def _called(text: str) -> str:
    """Return what a text calls in the end, as `queue.get(`, without arguments; the text where it is no call."""
    for tried in (text, f"{text})", f"{text}\n pass"):  # a call that goes on in the next line; a header of a block
        try:
            (statement,) = ast.parse(tried).body
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        node: ast.AST | None = getattr(statement, "value", getattr(statement, "test", getattr(statement, "iter", None)))
        if isinstance(node, ast.Await):
            node = node.value
        if isinstance(node, ast.Call):
            return f"{_name(node.func)}("
        return _name(node) if isinstance(node, ast.Attribute | ast.Name) else text
    return text


def _name(node: ast.AST) -> str:
    """Return a name with what it is taken from: `handles.get.wait` of `handles.get(key).wait`."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.id if isinstance(node, ast.Name) else _name(node.value) if isinstance(node, ast.Subscript) else ""
