"""Isolation and timing of probes: a probe that fails switches itself off, says so once, and the job goes on."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.errors import text_of

#: To a dictionary of locals that nobody else holds: by the frame, by our name, by the call that counts.
_OWN_REFERENCES = 3
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
#: Packages whose errors may come from what a probe does; others are raised by nobody but the user.
_LIBRARIES = ("ddpdebug", "functorch", "numpy", "prometheus_client", "rich", "safetensors", "torch")
_RAISE_HERE = frozenset({*sys.stdlib_module_names, *_LIBRARIES})
#: Of this thread; a look at each takes 30 ns.
_dispatch_modes, _function_modes = internals.dispatch_modes, internals.function_modes
_transforms = internals.transform
_gradients = torch.is_grad_enabled
#: Of this thread; to enter and leave it takes 200 ns.
_as_plain = internals.as_plain


class Guard:
    """Runs probe code. Counts the time spent in it (`seconds`) and remembers which parts are off.

    What the user's own code raises while a probe happens to run (a signal handler, an exception that another thread
    sent) is the user's, and goes on its way. Modes that the user has put over torch's operations, and his classes of
    tensors, do not see those of a probe, and nothing is looked at while `torch.func` transforms what runs.

    Args:
        on_trouble: called once per failing part with (part, message).
    """

    def __init__(self, on_trouble: Callable[[str, str], None]) -> None:
        self.seconds = 0.0
        self.off: set[str] = set()
        self.quiet = False  # a replay is running: what it does is no part of the training
        self.own_modes = 0  # dispatch modes of ours that lie on the stack
        self.on_cut: Callable[[], None] = _nothing  # an exception of the user's has cut a probe short
        self.entries: Any = None  # what runs under it, see `entries.py`
        self._on_trouble = on_trouble
        self._depth = 0
        self._entered = 0.0

    @property
    def active(self) -> bool:
        """Tell whether a probe runs."""
        return self._depth > 0

    def elapsed(self) -> float:
        """Return the seconds spent so far, the current probe included."""
        return self.seconds + (time.perf_counter() - self._entered if self._depth else 0.0)

    def run(self, part: str, probe: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `probe(*args, **kwargs)`, or None when the part is off or fails."""
        if part in self.off or (self.quiet and part.startswith("probe:")):
            return None
        if _dispatch_modes() > self.own_modes or _function_modes() or _transforms() is not None:
            if not internals.can_step_aside():
                return None
            args, probe = (probe, *args), internals.aside_of_modes
        outermost, gradients = self._depth == 0, _gradients()
        self._depth += 1  # a signal is handled after a call at the earliest: nothing stands between this and `try`
        try:
            if not outermost:
                return probe(*args, **kwargs)
            self._entered = time.perf_counter()
            with _as_plain():
                return probe(*args, **kwargs)
        except Exception as error:
            _put_back(gradients)
            users = users_error(error)
            if users is error:
                self.cut()
                raise
            self._fail_or_pass_on(part, error, users)
            return None
        except BaseException:  # Ctrl-C, the end of the process: never ours
            _put_back(gradients)
            self.cut()
            raise
        finally:
            self._depth -= 1
            if outermost:
                self.seconds += time.perf_counter() - self._entered

    def contain(self, part: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `call(*args, **kwargs)`, or None when the part is off or fails: what is no probe, in any thread.

        Its time does not count, and torch is not asked for modes.
        """
        if part in self.off:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            users = users_error(error)
            if users is error:
                raise
            self._fail_or_pass_on(part, error, users)
            return None

    def _fail_or_pass_on(self, part: str, error: Exception, users: BaseException | None) -> None:
        """Switch a part off, or raise the user's error in whose place ours has come."""
        if users is None:
            self.fail(part, error)
            return
        self.cut()
        context, suppressed = users.__context__, users.__suppress_context__
        try:
            raise users
        finally:
            users.__context__, users.__suppress_context__ = context, suppressed

    def cut(self) -> None:
        """Have what was half noted forgotten."""
        try:
            self.on_cut()
        except Exception as error:
            if is_users(error):
                raise
            self.fail("probe:cut", error)

    def forgive(self, seconds: float) -> None:
        """Take time back that was spent waiting for other ranks: it is no cost of looking."""
        self.seconds -= seconds

    def tell(self, part: str, message: str) -> None:
        """Report something that is not looked at."""
        try:
            self._on_trouble(part, message)
        except Exception as error:
            if is_users(error):
                raise

    def fail(self, part: str, error: BaseException) -> None:
        """Switch a part off and report it once."""
        if part not in self.off:
            self.off.add(part)
            self.tell(part, text_of(error))


def _put_back(gradients: bool) -> None:  # noqa: FBT001 - the state itself
    """Let autograd record, or not, as before: an exception may come between the two halves of a `torch.no_grad()`."""
    if _gradients() is not gradients:
        torch.set_grad_enabled(gradients)


def _nothing() -> None:
    """Stand in for what nobody has asked to be told."""


def contained(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call for a thread of ours whose failures are all ordinary exceptions with a text.

    `SystemExit` would end the thread without a word.
    """

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except BaseException as error:
            if isinstance(error, Exception) and text_of(error) != type(error).__name__:
                raise
            raise RuntimeError(text_of(error)) from error

    return run


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
    code = frame.f_code
    if code.co_filename.startswith(_OWN):
        return False
    names = code.co_varnames[: code.co_argcount]
    rest = code.co_argcount + code.co_kwonlyargcount
    values = local_values(frame)
    if any(values.get(name) is interrupted for name in names):
        return True
    if code.co_flags & inspect.CO_VARARGS and any(v is interrupted for v in values.get(code.co_varnames[rest], ())):
        return True
    return any(code is _code_of(signal.getsignal(number)) for number in signal.valid_signals())


def _code_of(handler: Any) -> Any:
    """Return the code that runs when something is called; None where it is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = inspect.unwrap(getattr(handler, "__func__", handler)) if callable(handler) else None
    called = getattr(type(handler), "__call__", None)  # noqa: B004 - its code is what is wanted
    return getattr(handler, "__code__", None) or getattr(called, "__code__", None)


def calling_frame() -> FrameType | None:
    """Return the nearest frame that is not ours: what has called the function that a wrapper of ours stands for."""
    current: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None and current.f_code.co_filename.startswith(_OWN):
        current = current.f_back
    return current


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the nearest frame that is the user's: not ddpdebug, not torch, not the standard library."""
    current: FrameType | None = start or sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while current is not None and not is_user_file(current.f_code.co_filename):
        current = current.f_back
    return current


def user_location(start: FrameType | None = None) -> str | None:
    """Return `file:line` of the nearest frame that is the user's."""
    frame = user_frame(start or sys._getframe(1))  # noqa: SLF001 - as above
    return None if frame is None else location(frame.f_code.co_filename, frame.f_lineno)


def local_values(frame: FrameType) -> dict[str, Any]:
    """Return a function's local variables without leaving anything of them behind; none of a module or class body.

    Before Python 3.13 a frame keeps the dictionary that it is asked for, and with it every value, until it ends: a
    batch and its graph would live on. It is emptied, unless the function itself has called `locals()` and kept it.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if type(kept) is dict and sys.getrefcount(kept) <= _OWN_REFERENCES:
        kept.clear()
    return found


def location(file: str, line: int) -> str:
    """Return a place in a file as people write it."""
    return f"{shorten(file)}:{line}"


def short_path(path: Path) -> str:
    """Return a path as people write it: from the current directory where it lies below."""
    return shorten(str(path))


_seen: dict[str, bool] = {}


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
