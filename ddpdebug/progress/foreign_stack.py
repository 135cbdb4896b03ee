"""The Python stack of another process of the host, read from its memory: that process need not run for it.

So it is had of a process that is stopped, that waits in the kernel, or whose interpreter's lock is held in C, at no
cost to one that is healthy. Nothing is written, and a wrong address is an error of the reader's. A timer of
`faulthandler` would write it from inside, without the lock: where the process has gone on by then, as after SIGCONT,
that reads frames while they change, and ends the process by SIGSEGV (Python 3.11, measured: within some dumps).

Where things lie in the interpreter's objects is found out in this process, by looking for addresses that are known, and
proved by reading a stack of our own. It holds for the other one where that runs the same build. The kernel may forbid
it (`ptrace_scope`, containers), and no rank asks it for leave: then there is no stack, and the last look of the process
stands in. Torch-free.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, Self

_WORD = struct.Struct("=Q")
_TAGS = 3  # low bits of a pointer that later versions keep marks in
_CODE_BYTES, _THREAD_BYTES = 256, 512
_MOST_FRAMES, _MOST_TEXT, _MOST_TABLE = 60, 4096, 1 << 20
#: Of the objects of CPython: the type, and the length of a text or of bytes.
_TYPE_AT, _LENGTH_AT = 8, 16
#: Python 3.12 has frames with this file, and a code object, where C has called: no others see them.
_FROM_C = "<shim>"
#: Of a function that is made to be found.
_FIRST_LINE = 54321

BUILD = f"{sys.version} {sys.implementation.cache_tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A frame: file, line and function, with the columns of the call if known."""

    file: str
    line: int
    function: str
    columns: tuple[int, int] | None = None


class _Memory:
    """The memory of a process, as long as it is open."""

    def __init__(self, pid: int) -> None:
        self.descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, address: int, size: int) -> bytes:
        data = os.pread(self.descriptor, size, address)
        if len(data) != size:
            raise OSError("less than there should be")
        return data

    def word(self, address: int) -> int:
        return int(_WORD.unpack(self.read(address, 8))[0])

    def text(self, address: int) -> str:
        """Return a text, by its length and where its letters may lie."""
        length = self.word(address + _LENGTH_AT)
        if length > _MOST_TEXT:
            raise ValueError("no text")
        data = self.read(address + sys.getsizeof("") - 1, length)
        if all(32 <= letter < 127 for letter in data):
            return data.decode("ascii")
        start = address + sys.getsizeof(chr(256) + chr(257)) - 6  # a new one: others may count bytes that lie elsewhere
        for size, encoding in ((1, "latin-1"), (2, "utf-16-le"), (4, "utf-32-le")):
            data = self.read(start, (length + 1) * size)
            with suppress(UnicodeDecodeError):
                text = data.decode(encoding)
                if text.endswith("\0") and "\0" not in text[:-1]:
                    return text[:-1]
        raise ValueError("no text")

    def bytes(self, address: int) -> bytes:
        length = self.word(address + _LENGTH_AT)
        if length > _MOST_TABLE:
            raise ValueError("no bytes")
        return self.read(address + sys.getsizeof(b"") - 1, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Distances in bytes: in a thread's state to its frame (before 3.13 by way of another place), in frames, code."""

    current: tuple[int, ...]
    code: int
    previous: int
    instruction: int
    filename: int
    name: int
    table: int
    first_line: int
    instructions: int


def thread_state(ident: int) -> int:
    """Return the address of a thread's state in this process, by which another one finds its frames; 0 if unknown."""
    with suppress(Exception), _Memory(os.getpid()) as memory:
        api: Any = ctypes.PyDLL(None)  # of our own: what is set on its functions holds for nobody else
        get, head, following = api.PyThreadState_Get, api.PyInterpreterState_ThreadHead, api.PyThreadState_Next
        interpreter = api.PyInterpreterState_Get
        for function, takes in (
            (get, []),
            (interpreter, []),
            (head, [ctypes.c_void_p]),
            (following, [ctypes.c_void_p]),
        ):
            function.restype, function.argtypes = ctypes.c_void_p, takes
        own = memory.read(get(), _THREAD_BYTES)
        at = next(_places(own, threading.get_ident()))
        state = head(interpreter())
        while state:
            if memory.word(state + at) == ident:
                return int(state)
            state = following(state)
    return 0


def read(pid: int, state: int) -> list[Place]:
    """Return the stack of a thread in a process of the same build, innermost first; empty if it cannot be read."""
    layout = _layout()
    if layout is None or not state:
        return []
    found: list[Place] = []
    with suppress(OSError, ValueError, OverflowError, struct.error), _Memory(pid) as memory:
        found += _walk(memory, layout, state)
    return found


def _walk(memory: _Memory, layout: _Layout, state: int) -> Iterator[Place]:
    frame = state
    for distance in layout.current:
        frame = memory.word(frame + distance)
    kind = 0
    for _ in range(2 * _MOST_FRAMES):  # as many again for calls from C
        if not frame:
            return
        code = memory.word(frame + layout.code) & ~_TAGS
        kind = kind or memory.word(code + _TYPE_AT)
        if memory.word(code + _TYPE_AT) == kind:  # else it stands for a call from C
            place = _place(memory, layout, frame, code)
            if place.file != _FROM_C:
                yield place
        frame = memory.word(frame + layout.previous)


def _place(memory: _Memory, layout: _Layout, frame: int, code: int) -> Place:
    offset = memory.word(frame + layout.instruction) - code - layout.instructions
    (first,) = struct.unpack("=i", memory.read(code + layout.first_line, 4))
    table = memory.bytes(memory.word(code + layout.table))
    like = _layout.__wrapped__.__code__.replace(co_linetable=table, co_firstlineno=first)
    line, columns = first, None
    for index, (begin, end, start, stop) in enumerate(like.co_positions()):
        if index == max(offset // 2, 0):
            line = first if begin is None else begin
            columns = (start, stop) if begin == end and start is not None and stop is not None else None
            break
    name, file = memory.text(memory.word(code + layout.name)), memory.text(memory.word(code + layout.filename))
    return Place(file=file, line=line, function=name, columns=columns)


# --- where things lie -------------------------------------------------------------------------------------------------


@cache
def _layout() -> _Layout | None:
    """Find out where things lie; None where that cannot be, or does not come to our own stack."""
    try:
        with _Memory(os.getpid()) as memory:
            scope: dict[str, Any] = {}
            exec("\n" * (_FIRST_LINE - 1) + "def outer(inner, memory): return inner(memory)", scope)  # noqa: S102
            outer: Callable[[Callable[[_Memory], _Layout], _Memory], _Layout] = scope["outer"]
            layout = outer(_find, memory)
            seen = list(_walk(memory, layout, _own_state()))
            frame: FrameType | None = sys._getframe()  # noqa: SLF001 - what is compared
            own: list[tuple[str, str]] = []
            while frame is not None and len(own) < _MOST_FRAMES - 8:
                own.append((frame.f_code.co_filename, frame.f_code.co_name))
                frame = frame.f_back
    except Exception:  # noqa: BLE001 - another interpreter than we know, or no such files
        return None
    shown = [(place.file, place.function) for place in seen]
    start = shown.index(own[0]) if own[0] in shown else 0
    return layout if shown[start : start + len(own)] == own else None


def _find(memory: _Memory) -> _Layout:
    """Look for what is known of this frame and of the one that has called it."""
    here = sys._getframe()  # noqa: SLF001 - it is this frame that is looked for
    caller = here.f_back
    assert caller is not None
    frame, code_at = _inside(memory, here)
    outer, _ = _inside(memory, caller)
    code: CodeType = caller.f_code
    body, of_outer, data = memory.read(frame, 64), memory.read(outer, 80), memory.read(id(code), _CODE_BYTES)
    within = range(id(code), id(code) + code.__sizeof__())
    instruction = next(at for at in range(0, 80, 8) if at != code_at and _word(of_outer, at) in within)
    state, wanted = _own_state(), frame
    thread = os.pread(memory.descriptor, _THREAD_BYTES, state)
    current: tuple[int, ...] | None = next(((at,) for at in _places(thread, wanted)), None)
    for at in range(0, _THREAD_BYTES if current is None else 0, 8):
        with suppress(OSError, OverflowError):
            between = os.pread(memory.descriptor, 64, _word(thread, at))
            current = next(((at, further) for further in _places(between, wanted)), None)
        if current is not None:
            break
    assert current is not None
    return _Layout(
        current=current,
        code=code_at,
        previous=next(_places(body, outer)),
        instruction=instruction,
        filename=next(_places(data, id(code.co_filename))),
        name=next(_places(data, id(code.co_name))),
        table=next(_places(data, id(code.co_linetable))),
        first_line=next(at for at in range(0, _CODE_BYTES, 4) if struct.unpack_from("=i", data, at)[0] == _FIRST_LINE),
        instructions=_word(of_outer, instruction) - id(code) - caller.f_lasti,
    )


def _inside(memory: _Memory, frame: FrameType) -> tuple[int, int]:
    """Return the address of what the interpreter works on behind a frame object, and where that holds its code."""
    of_object = memory.read(id(frame), 80)
    for at in range(_TYPE_AT + 8, 80, 8):
        with suppress(OSError, OverflowError):
            address = _word(of_object, at)
            inner = os.pread(memory.descriptor, 64, address)
            for code_at in range(0, len(inner) - 7, 8):
                if _word(inner, code_at) & ~_TAGS == id(frame.f_code):
                    return address, code_at
    raise ValueError("no frame")


def _own_state() -> int:
    function = ctypes.PyDLL(None).PyThreadState_Get
    function.restype = ctypes.c_void_p
    return int(function())


def _word(data: bytes, at: int) -> int:
    return int(_WORD.unpack_from(data, at)[0])


def _places(data: bytes, value: int) -> Iterator[int]:
    return (at for at in range(0, len(data) - 7, 8) if _word(data, at) == value)
