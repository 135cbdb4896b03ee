"""Calls a function as the interpreter calls a script: no frame lies below it, and no frame of ddpdebug is visible.

Loads next to nothing. See docs/decisions/061.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any, TypeVar

    _F = TypeVar("_F", bound=Callable[..., Any])


def unseen(function: _F) -> _F:
    """Hide the frames of a function from stack walks and tracebacks.

    A frame counts as one that is still being set up until it has come to the instruction RESUME: here it never does.
    """
    from opcode import opmap  # noqa: PLC0415 - goes with what `call_outermost` unloads

    code = function.__code__
    instructions = bytearray(code.co_code)
    instructions[instructions[::2].index(opmap["RESUME"]) * 2] = opmap["NOP"]
    function.__code__ = code.replace(co_code=bytes(instructions))
    return function


@unseen
def untraced(call: Callable[..., object], *args: object) -> object:
    """Return `call(*args)`, hidden from a debugger or profiler that goes on after the script's last line."""
    trace, profile = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    try:
        return call(*args)
    finally:
        sys.setprofile(profile)
        sys.settrace(trace)


def call_outermost(function: Callable[..., object], *args: object) -> None:
    """Call a function as if it were the script, and end the process: by its exception, else with status 0.

    Only the interpreter may be below our own frames, and the caller's must let all exceptions pass. Where a profiler,
    say, is below them, the function is called in its place: this returns, and raises what it raises.
    """
    if not _only_the_interpreter_is_below():
        function(*args)
        return
    raise _Call(function, args)


#: Modules called `__main__` that the interpreter has begun to run, and to which it comes back at its end.
_programs: list[object] = []


class _Call(BaseException):
    """Leaves all frames; what the interpreter then calls, `sys.excepthook`, is ours for once and calls the function."""

    def __init__(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        self._function, self._args = function, args
        self._report, sys.excepthook = sys.excepthook, self._arrive
        _programs.append(sys.modules["__main__"])

    @unseen
    def _arrive(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = self._report
        if value is not self:  # an interrupt was faster
            self._report(kind, value, trace)
            return
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        _unload()
        caught: BaseException | None = None
        try:
            self._function(*self._args)
        except SystemExit as error:
            if not sys.flags.inspect:
                raise
            caught = error
        except BaseException as error:  # noqa: BLE001 - as the interpreter does
            caught = error
        if caught is not None:
            _report(caught)
        if untraced(_goes_on):
            return
        untraced(_end_of_file)
        if not isinstance(caught, KeyboardInterrupt):
            raise SystemExit(int(caught is not None))
        untraced(_end_by_interrupt)


def _only_the_interpreter_is_below() -> bool:
    """Whether we were called by `python -m ddpdebug`, or by a script that only calls it, and nobody looks on."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented
    while frame is not None and frame.f_globals["__name__"].startswith("ddpdebug."):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "<module>" or frame.f_globals["__name__"] != "__main__":
        return False
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__") == "runpy":
        frame = frame.f_back
    return frame.f_back is None and sys.gettrace() is None and sys.getprofile() is None


def _unload() -> None:
    """Let modules behind `site`, the last one that the interpreter loads for every script, be loaded anew."""
    names = list(sys.modules)
    later = names[names.index("site") + 1 :] if "site" in names else []
    if "threading" in later:  # knows the main thread and is known to the interpreter: somebody else has loaded much
        return
    for name in later:
        if name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names:
            del sys.modules[name]


@unseen
def _report(error: BaseException) -> None:
    """Report what nobody has caught, as the interpreter does."""
    trace = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as another:  # noqa: BLE001 - the script's
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(another), another, another.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)


def _goes_on() -> bool:
    """Whether the interpreter goes on at its prompt: a script may ask for that while it runs."""
    asked = not sys.flags.ignore_environment and bool(os.environ.get("PYTHONINSPECT")) and os.isatty(0)
    return asked or bool(sys.flags.inspect)


def _end_of_file() -> None:
    """Take away what the interpreter takes away where a script has not ended by SystemExit: exit handlers miss it."""
    scope = vars(sys.modules.get("__main__", sys))
    if scope.get("__spec__", sys) is None:
        scope.pop("__file__", None)
        scope.pop("__cached__", None)


def _end_by_interrupt() -> None:
    """Have the interpreter end by SIGINT, as it does where the last code that it was given as text was interrupted."""
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - as a text it sets what the interpreter looks at, at its end
    except KeyboardInterrupt:
        return
