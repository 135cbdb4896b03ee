"""The user's code, told from everybody else's: frames, files, and errors that it has raised on its own account."""

from __future__ import annotations

import functools
import gc
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: A handler that wraps handlers that wrap handlers.
_MAX_WRAPPED = 20
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
#: Packages whose errors may come from what a probe does; others are raised by nobody but the user.
_LIBRARIES = ("ddpdebug", "functorch", "numpy", "prometheus_client", "rich", "safetensors", "torch", "triton")
_RAISE_HERE = frozenset({*sys.stdlib_module_names, *_LIBRARIES})


def is_users(error: BaseException) -> bool:
    """Tell whether the user's own code raised an error on its own account while ours was running.

    So does a signal handler, which the interpreter calls between two of our lines: with the frame that it interrupts as
    an argument. So does another thread that has an exception raised here: its class is then none that a library of ours
    raises, and no code of the user's is on the way. What the user's code raises because we have called it (the iterator
    of a container, a subclass of Tensor) is our own failure.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    previous, trace = trace.tb_frame, trace.tb_next
    met_user = False
    while trace is not None:
        frame = trace.tb_frame
        if _handles_signal(frame, previous):
            return True
        met_user = met_user or is_user_file(frame.f_code.co_filename)
        previous, trace = frame, trace.tb_next
    kind = type(error)
    if kind is TimeoutError and not error.args:
        return not met_user  # nothing but a limit of time is raised without a word
    return not met_user and str(kind.__module__).partition(".")[0] not in _RAISE_HERE


def users_error(error: BaseException) -> BaseException | None:
    """Return the user's own error that one raised in our code is, or hides; None where it is ours.

    A `StopIteration` that a handler raises inside a generator becomes a `RuntimeError`, and what is raised while
    another error is on its way takes its place.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace = current.__traceback__
        # what the user's code is handling while it calls us has begun there
        if not (current is error or isinstance(current, StopIteration)) and (
            trace is None or is_user_file(trace.tb_frame.f_code.co_filename)
        ):
            return None
        if is_users(current):
            return current
        current = current.__cause__ or current.__context__
    return None


def _handles_signal(frame: FrameType, interrupted: FrameType) -> bool:
    """Tell whether a frame, which has ended, is that of a signal handler."""
    if frame.f_code.co_filename.startswith(_OWN):
        return False
    if frame.f_code in _handlers():
        return True
    # A handler that has put another in its place was given a number and the frame that it interrupts. What a frame that
    # has ended refers to are its values, and its caller.
    values = gc.get_referents(frame)
    if not any(type(value) is int and value in signal.valid_signals() for value in values):
        starred = [value for value in values if type(value) is tuple and len(value) == 2]
        return any(pair[1] is interrupted for pair in starred)
    return sum(value is interrupted for value in values) > _CALLERS


def _handlers() -> set[CodeType]:
    """Return the code of all signal handlers that are installed now."""
    return {code for number in signal.valid_signals() for code in _codes_of(signal.getsignal(number))}


def _codes_of(handler: Any) -> list[CodeType]:
    """Return the code that runs when something is called, and that of what it wraps; none where it is not Python's."""
    found: list[CodeType] = []
    for _ in range(_MAX_WRAPPED):
        if isinstance(handler, functools.partial):
            handler = handler.func
            continue
        function = getattr(handler, "__func__", handler)
        called = getattr(type(function), "__call__", None)  # noqa: B004 - its code is what is wanted
        code = getattr(function, "__code__", None) or getattr(called, "__code__", None)
        found += [code] if isinstance(code, CodeType) else []
        handler = getattr(function, "__wrapped__", None)
        if handler is None:
            break
    return found


def _count_callers() -> int:
    """Return how often a frame that has ended refers to its caller: it depends on the version of Python."""

    def fail() -> None:
        raise ValueError

    try:
        fail()
    except ValueError as error:
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        return sum(value is trace.tb_frame for value in gc.get_referents(trace.tb_next.tb_frame))
    return 0


_CALLERS = _count_callers()


def calling_frame() -> FrameType | None:
    """Return the nearest frame that is not ours: what has called the function that a wrapper of ours stands for."""
    current: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None and current.f_code.co_filename.startswith(_OWN):
        current = current.f_back
    return current


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the nearest frame that is the user's: not ddpdebug, not torch, not the standard library."""
    current: FrameType | None = start or sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None:
        name = current.f_code.co_filename
        known = _seen.get(name)
        if known or (known is None and is_user_file(name)):
            break
        current = current.f_back
    return current


def user_location(start: FrameType | None = None) -> str | None:
    """Return `file:line` of the nearest frame that is the user's."""
    frame = user_frame(start or sys._getframe(1))  # noqa: SLF001 - as above
    if frame is None:
        return None
    code = frame.f_code
    key = id(code), frame.f_lasti
    known = _lines.get(key)
    if known is None or known[0] is not code:  # in a long function it takes microseconds to find the line
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        known = _lines[key] = code, location(code.co_filename, frame.f_lineno)
    return known[1]


def location(file: str, line: int) -> str:
    """Return a place in a file as people write it."""
    return f"{shorten(file)}:{line}"


_seen: dict[str, bool] = {}
#: Where code stands by what it has run last; the code as well, whose number another may have after it.
_lines: dict[tuple[int, int], tuple[CodeType, str]] = {}
_MOST_LINES = 1024


def is_user_file(name: str) -> bool:
    """Tell whether a file is neither ours nor torch's, another package's or the standard library's."""
    known = _seen.get(name)
    if known is None:
        libraries = (_OWN, "<", sys.base_prefix + "/lib/python", sys.prefix + "/lib/python")
        known = not (name.startswith(libraries) or "/site-packages/" in name or "/dist-packages/" in name)
        _seen[name] = known
    return known


@functools.lru_cache(maxsize=1024)
def shorten(name: str) -> str:
    """Return a file's path from the current directory, if it lies below it."""
    try:
        return str(Path(name).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError) as error:
        if is_users(error):
            raise
        return name
