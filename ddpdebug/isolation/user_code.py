"""Recognition of user code: its frames, its files, and exceptions that it raises on its own account."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ddpdebug.isolation.local_variables import local_values

#: A handler that wraps handlers that wrap handlers.
_MAX_WRAPPED = 20
#: What happens to a function that is traced or profiled, in the words that are given to who does that.
_EVENTS = frozenset({"call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception"})
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
#: Packages whose errors may come from what a probe does; others are raised by nobody but the user.
_LIBRARIES = ("ddpdebug", "functorch", "numpy", "prometheus_client", "rich", "safetensors", "torch", "triton")
_RAISE_HERE = frozenset({*sys.stdlib_module_names, *_LIBRARIES})


def is_users(error: BaseException) -> bool:
    """Whether user code raised an error on its own account while ddpdebug's code was running.

    So does what the interpreter calls between two of our lines, with the frame that it interrupts as an argument: a
    signal handler, a function that traces or profiles. So does another thread that has an exception raised here: its
    class is then none that a library of ours raises, and no code of the user's is on the way. What the user's code
    raises because we have called it (the iterator of a container, a subclass of Tensor) is our own failure.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    previous, trace = trace.tb_frame, trace.tb_next
    met_user = False
    while trace is not None:
        frame = trace.tb_frame
        if _was_called_by_python(frame, previous):
            return True
        met_user = met_user or is_user_file(frame.f_code.co_filename)
        previous, trace = frame, trace.tb_next
    kind = type(error)
    if kind is TimeoutError and not error.args:
        return not met_user  # nothing but a limit of time is raised without a word
    return not met_user and str(kind.__module__).partition(".")[0] not in _RAISE_HERE


def users_error(error: BaseException) -> BaseException | None:
    """Return the user's own error that an error in ddpdebug's code is, or hides; None if there is none.

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


def _was_called_by_python(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether a frame, which has ended, is that of a signal handler, or of what traces or profiles.

    The interpreter calls them between two lines, and nobody else gives a function the frame that it interrupts. What
    traces is given the frame of the function that begins or ends as well.
    """
    if frame.f_code.co_filename.startswith(_OWN):
        return False
    if frame.f_code in _handlers():
        return True
    values = list(local_values(frame).values())
    # a handler that has put another in its place, a trace function that has raised and is none any more
    calls = [values, *(value for value in values if type(value) is tuple and len(value) in {2, 3})]
    return any([_is_such_call(call, frame, interrupted) for call in calls])


def _is_such_call(values: Sequence[Any], frame: FrameType, interrupted: FrameType) -> bool:
    frames = [value for value in values if type(value) is FrameType and value is not frame]
    if any([type(value) is int and value in signal.valid_signals() for value in values]):
        return any([value is interrupted for value in frames])
    traces = any([type(value) is str and value in _EVENTS for value in values])
    return traces and any([value is interrupted or value.f_back is interrupted for value in frames])


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


def calling_frame() -> FrameType | None:
    """Return the nearest frame outside ddpdebug: the caller of the wrapped function."""
    current: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None and current.f_code.co_filename.startswith(_OWN):
        current = current.f_back
    return current


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the nearest frame of user code: not ddpdebug, not torch, not the standard library."""
    current: FrameType | None = start or sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None:
        name = current.f_code.co_filename
        known = _seen.get(name)
        if known or (known is None and is_user_file(name)):
            break
        current = current.f_back
    return current


def user_location(start: FrameType | None = None) -> str | None:
    """Return `file:line` of the nearest frame of user code."""
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
    """Return a place in a file as `file:line`."""
    return f"{shorten(file)}:{line}"


_seen: dict[str, bool] = {}
#: Where code stands by what it has run last; the code as well, whose number another may have after it.
_lines: dict[tuple[int, int], tuple[CodeType, str]] = {}
_MOST_LINES = 1024


def is_user_file(name: str) -> bool:
    """Whether a file belongs to the user: not to ddpdebug, torch, another package or the standard library."""
    known = _seen.get(name)
    if known is None:
        libraries = (_OWN, "<", sys.base_prefix + "/lib/python", sys.prefix + "/lib/python")
        known = not (name.startswith(libraries) or "/site-packages/" in name or "/dist-packages/" in name)
        _seen[name] = known
    return known


@functools.lru_cache(maxsize=1024)
def shorten(name: str) -> str:
    """Return a file's path relative to the current directory if it lies below it."""
    try:
        return str(Path(name).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError) as error:
        if is_users(error):
            raise
        return name
