"""Runs a script in this process as `python script.py` or `python -m module` would. Loads next to nothing before it.

The script gets a real `__main__` module that stays until the process ends (pickling, spawned workers), its own
`sys.argv` and `sys.path[0]`. Its exceptions leave through the interpreter's own door, which prints them, calls
`sys.excepthook`, and sets the exit status; our frames are in none of them. Its end is the interpreter's own, teardown
included.
"""

from __future__ import annotations

import _frozen_importlib as imports
import _frozen_importlib_external as files
import atexit
import builtins
import marshal
import os
import sys

from ddpdebug.processes.outermost import unseen, untraced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import Any, Protocol

    class Attached(Protocol):
        """The part of a monitor that is used here."""

        def close(self, reason: str, exit_code: int | None) -> None:
            """Close the monitor: may take a few seconds, may be called twice."""


_Module = type(sys)
#: The file of the wrappers that stand in the place of built-in functions.
_WRAPPERS = __file__.replace(os.path.join("processes", "script.py"), os.path.join("probes", "importlib_bootstrap.py"))  # noqa: PTH118


class Target:
    """The script or module to run: `name` is a path, or with `module` the dotted name after `-m`."""

    __slots__ = ("args", "module", "name")

    def __init__(self, *, name: str, args: tuple[str, ...] = (), module: bool = False) -> None:
        self.name, self.args, self.module = name, args, module

    @property
    def command(self) -> tuple[str, ...]:
        """The words after `python`."""
        return (*(("-m",) if self.module else ()), self.name, *self.args)

    def check(self) -> None:
        """Raise TargetError, with Python's exit code, if there is no such script or module; imports nothing."""
        from ddpdebug.errors import TargetError  # noqa: PLC0415 - not in the process that becomes the script

        if self.module:
            _check_module(self.name)
        elif not os.path.exists(self.name):  # noqa: PTH110 - as in all of this file: pathlib is not loaded
            raise TargetError(f"script {self.name!r} does not exist (looked in {os.getcwd()})")  # noqa: PTH109
        elif not os.access(self.name, os.R_OK):
            raise TargetError(f"script {self.name!r} cannot be read")
        elif os.path.isdir(self.name) and not _holds_main(self.name):  # noqa: PTH112
            raise TargetError(f"{self.name!r} is a directory without __main__.py; give a script, or -m package", 1)

    def syntax_error(self) -> str | None:
        """Return the SyntaxError that a script would raise, as Python prints it; None if none is known."""
        if self.module or not os.path.isfile(self.name) or _importer(self.name) is not None:  # noqa: PTH113
            return None
        path, source = _read(self.name)
        if _is_compiled(path, source):
            return None
        import traceback  # noqa: PLC0415 - not in the process that becomes the script
        import warnings  # noqa: PLC0415

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script gives them itself
                compile(source, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            return "".join(traceback.format_exception(error.with_traceback(None)))
        return None


@unseen
def run_script(target: Target, before: Callable[[], Attached | None]) -> None:
    """Run `target` to its end; return normally after its end or a stop, and raise its exception.

    Args:
        before: called when the script's surroundings are in place, before its first line; returns the monitor.
    """
    process = os.getpid()
    _surround(target)
    monitor = before()
    reason, exit_code = "finished", 0
    try:
        call, arguments = _loaded(target)
        call(*arguments)
    except SystemExit as error:
        exit_code = _exit_code(error)
        reason = "finished" if exit_code == 0 else f"exception: {_said_by(error)}"
        raise
    except BaseException as error:
        if _is_stop(error):
            reason = "stopped"
        else:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "interrupted" if interrupted else f"exception: {_said_by(error)}"
            exit_code = 130 if interrupted else 1
            if interrupted and monitor is not None and os.getpid() == process:
                ending, monitor = monitor, None  # what was found is printed below the traceback
                _hide_callers(error, lambda: untraced(ending.close, reason, exit_code))
            else:
                _hide_callers(error)
            raise
    finally:
        if monitor is not None and os.getpid() == process:  # a fork that comes home is not the rank
            untraced(monitor.close, reason, exit_code)


def end_with(exit_code: Callable[[], int | None]) -> None:
    """Register the exit status to be set at the end of the interpreter's shutdown; to be called before the script runs.

    What runs in C after that is left out: destructors of libraries, in which torch 2.13 may abort.

    Args:
        exit_code: called after the script's exit handlers, before those that were there earlier (coverage's, those of
            a `sitecustomize`); None leaves the status to the interpreter.
    """
    process = os.getpid()

    def conclude() -> None:
        if os.getpid() == process and (code := exit_code()) is not None:
            _leave_with(code)

    atexit.register(conclude)  # the first registered is the last called


def _leave_with(code: int) -> None:
    """Have the C library end the process with a status before it runs any other handler of an exit."""
    from ctypes import CDLL, c_int, c_void_p, cast  # noqa: PLC0415 - torch has loaded it

    library = CDLL(None)
    at_exit = getattr(library, "__cxa_atexit", None)
    if at_exit is not None:
        at_exit.argtypes, at_exit.restype = (c_void_p, c_void_p, c_void_p), c_int
        for name, argument in (("_exit", code), ("fflush", None)):  # the last one is called first
            at_exit(cast(getattr(library, name), c_void_p), argument, None)


def _surround(target: Target) -> None:
    """Set what the script sees before its first line: `sys.argv` and `sys.path[0]`."""
    if target.module:
        first, name = os.getcwd(), "-m"  # noqa: PTH109
    else:
        first, name = _folder_of(target.name), target.name
        if _importer(_joined(name)) is not None:
            first = _joined(name)
            if sys.flags.safe_path:
                sys.path.insert(0, first)  # as Python does for what it imports `__main__` from
    sys.argv[:] = [name, *target.args]
    if not sys.flags.safe_path:
        sys.path[0] = first


@unseen
def _loaded(target: Target) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """Return what to call to run a target, by the interpreter's own functions; `__main__` is there."""
    main = _Module("__main__")
    scope = vars(main)
    scope["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        scope["__annotations__"] = {}
    if target.module or _importer(_joined(target.name)) is not None:
        import runpy  # noqa: PLC0415 - the interpreter loads it for these

        scope["__loader__"] = imports.BuiltinImporter
        sys.modules["__main__"] = main  # seen by the packages that are imported on the way
        return runpy._run_module_as_main, (target.name, True) if target.module else ("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001
    code = _load_script(target.name, scope)
    sys.modules["__main__"] = main
    return exec, (code, scope)


@unseen
def _load_script(name: str, scope: dict[str, Any]) -> CodeType:
    path, source = _read(name)
    is_compiled = _is_compiled(path, source)
    kind = files.SourcelessFileLoader if is_compiled else files.SourceFileLoader
    scope.update(__file__=path, __cached__=None, __loader__=kind("__main__", path), __package__=None, __spec__=None)
    if not is_compiled:
        return compile(source, path, "exec", dont_inherit=True)
    if source[:4] != files.MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    code: CodeType = marshal.loads(source[16:])  # noqa: S302 - the script
    return code


@unseen
def _read(name: str) -> tuple[str, bytes]:
    """Return the absolute path of a script and what is in it."""
    path = _joined(name)
    with open(path, "rb") as file:  # noqa: PTH123
        return path, file.read()


def _joined(name: str) -> str:
    """Return the absolute path of a script, joined and not normalised, as Python does."""
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


def _is_compiled(path: str, source: bytes) -> bool:
    return path.endswith(".pyc") or source[:2] == files.MAGIC_NUMBER[:2]


def _importer(name: str) -> object:
    """Return what imports from a path: for directories and zip files there is something, for scripts None."""
    cache: dict[str, Any] = sys.path_importer_cache
    if name not in cache:
        cache[name] = None  # as the interpreter remembers it
        for hook in sys.path_hooks:
            try:
                cache[name] = hook(name)
                break
            except ImportError:
                continue
    return cache[name]


def _holds_main(folder: str) -> bool:
    finder: Any = _importer(folder)
    return finder is None or finder.find_spec("__main__") is not None


def _check_module(name: str) -> None:
    import importlib.util  # noqa: PLC0415 - not in the process that becomes the script

    from ddpdebug.errors import TargetError  # noqa: PLC0415 - as above

    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or top == "__main__":
        raise TargetError(f"-m {name!r} is not the name of a module; a script is run without -m", 1)
    here = files.PathFinder.find_spec(top, [os.getcwd()])  # noqa: PTH109
    if here is None and importlib.util.find_spec(top) is None:
        raise TargetError(f"no module named {top!r} (looked in {os.getcwd()} and in sys.path)", 1)  # noqa: PTH109


def _is_stop(error: BaseException) -> bool:
    """Whether the monitor has stopped the script, which only one that is loaded can do."""
    errors = sys.modules.get("ddpdebug.errors")
    return errors is not None and isinstance(error, errors.StopRun)


def _folder_of(script: str) -> str:
    """Return the folder of a script as the interpreter finds it: what is no file, as a pipe, is followed once."""
    link = os.readlink(script) if os.path.islink(script) else ""  # noqa: PTH114, PTH115 - as the interpreter does
    place = os.path.join(os.path.dirname(script), link) if os.sep in link else script  # noqa: PTH118, PTH120
    try:  # noqa: SIM105 - nothing is imported that the script would not have
        place = os.path.realpath(place, strict=True)
    except OSError:
        pass
    return os.path.dirname(place)  # noqa: PTH120


def _exit_code(error: SystemExit) -> int:
    if type(error).code is not SystemExit.code:  # a property of the script's, which the interpreter is about to ask
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _said_by(error: BaseException) -> str:
    errors = sys.modules.get("ddpdebug.errors")
    return type(error).__name__ if errors is None else str(errors.text_of(error))


def _hide_callers(error: BaseException, then: Callable[[], object] = lambda: None) -> None:
    """Let the interpreter report `error` as if the script were its outermost frame, and call `then` after that."""
    report, own = getattr(sys, "excepthook", _without_hook), _without_wrappers(error.__traceback__)

    @unseen
    def without_us(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = report
        if value is error:
            trace = own
            value = value.with_traceback(trace)
            sys.last_traceback = trace
        try:
            report(kind, value, trace)
        finally:
            then()

    sys.excepthook = without_us


def _without_hook(*about: Any) -> None:
    """Do what the interpreter does where the script has deleted its hook."""
    print("sys.excepthook is missing", file=sys.stderr)
    sys.__excepthook__(*about)


def _without_wrappers(trace: TracebackType | None) -> TracebackType | None:
    """Take the wrappers of built-in functions out of a traceback; the first frame is the script's."""
    above = trace
    while above is not None and above.tb_next is not None:
        if above.tb_next.tb_frame.f_code.co_filename == _WRAPPERS:
            above.tb_next = above.tb_next.tb_next
        else:
            above = above.tb_next
    return trace
