"""Runs a script in this process as `python script.py` or `python -m module` would. Torch-free.

The script gets a real `__main__` module that stays until the process ends (pickling, spawned workers), its own
`sys.argv` and `sys.path[0]`. Its exceptions leave through the interpreter's own door, which prints them, calls
`sys.excepthook`, and sets the exit status; all that is done to them is that our frames are taken off the top.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Protocol

from ddpdebug.errors import StopRun, TargetError, UsageError


class Attached(Protocol):
    """The part of a monitor that is needed here."""

    def close(self, reason: str, exit_code: int | None) -> None:
        """End the monitor: may take a few seconds, may be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to run: `name` is a path, or with `module` the dotted name after `-m`."""

    name: str
    args: tuple[str, ...] = ()
    module: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """The words after `python`."""
        return (*(("-m",) if self.module else ()), self.name, *self.args)

    def check(self) -> None:
        """Raise TargetError where there is nothing to run; imports nothing."""
        if self.module:
            _check_module(self.name)
            return
        path = Path(self.name)
        if path.is_dir():
            raise TargetError(f"{self.name!r} is a directory; give a script, or a package as `-m package`")
        if not path.exists():
            raise TargetError(f"script {self.name!r} does not exist (looked in {Path.cwd()})")
        if not os.access(path, os.R_OK):
            raise TargetError(f"script {self.name!r} cannot be read")


def run_script(target: Target, *, before: Callable[[], Attached | None]) -> None:
    """Run `target` to its end; return normally where it does, or was stopped, and raise what it raises.

    Args:
        before: called when the script's surroundings are in place, before its first line; returns the monitor.
    """
    process = os.getpid()
    _surround(target)
    monitor = before()
    reason, exit_code = "finished", 0
    try:
        _execute(target)
    except StopRun:
        reason = "stopped"
    except SystemExit as error:
        exit_code = _exit_code(error)
        reason = "finished" if exit_code == 0 else f"exception: SystemExit: {error.code}"
        raise
    except TargetError as error:
        reason, exit_code = f"exception: TargetError: {error}", TargetError.exit_code
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if interrupted else f"exception: {type(error).__name__}: {error}"
        exit_code = 130 if interrupted else 1
        if isinstance(error, UsageError):
            error.by_script = True
        _hide_our_frames(error)
        raise
    finally:
        if monitor is not None and os.getpid() == process:  # a fork that comes home is not the rank
            monitor.close(reason, exit_code)


def end_hard(exit_code: Callable[[], int | None]) -> None:
    """Skip the interpreter's teardown, where torch 2.13 may abort; to be called before the script runs.

    Everything before it still happens: threads are joined, exit handlers run, the streams are flushed.

    Args:
        exit_code: called after the script's exit handlers, before those that were there earlier (coverage's, those of
            a `sitecustomize`); None leaves the ending to the interpreter.
    """
    process = os.getpid()

    def conclude() -> None:
        code = exit_code()
        if code is None or os.getpid() != process:
            return

        def leave(*_: object) -> None:
            if not sys.is_finalizing():  # a handler that is older than this one still runs
                return
            try:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads
                        stream.flush()
            except RuntimeError:  # in the midst of the interpreter's own flush; more garbage is collected after it
                return
            os._exit(code)

        gc.callbacks.insert(0, leave)  # the interpreter collects garbage between its exit handlers and its teardown
        gc.enable()

    atexit.register(conclude)  # the first registered is the last called


def _surround(target: Target) -> None:
    """Set what the script sees before its first line: `sys.argv` and `sys.path[0]`."""
    if target.module:
        first, name = str(Path.cwd()), "-m"
    else:
        first, name = str(Path(target.name).resolve().parent), target.name
    sys.argv[:] = [name, *target.args]
    if not sys.flags.safe_path:
        sys.path[0] = first


def _execute(target: Target) -> None:
    main = ModuleType("__main__")
    scope = vars(main)
    scope["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        scope["__annotations__"] = {}
    load = _load_module if target.module else _load_script
    code = load(target.name, scope)
    sys.modules["__main__"] = main
    exec(code, scope)  # noqa: S102 - running the user's script is what this is for


def _load_script(name: str, scope: dict[str, Any]) -> CodeType:
    path = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 - as Python does: joined, not normalised
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    scope.update(__file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _load_module(name: str, scope: dict[str, Any]) -> CodeType:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name)
    if spec is None or spec.loader is None:
        raise TargetError(f"no module named {name!r}")
    code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise TargetError(f"module {name!r} has no Python code")
    scope.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    sys.argv[0] = str(spec.origin)
    return code  # type: ignore[no-any-return]  # of a loader that has get_code


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)  # imports the parents, as Python does
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or top == "__main__":
        raise TargetError(f"-m {name!r} is not the name of a module; a script is run without -m")
    here = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    if here is None and importlib.util.find_spec(top) is None:
        raise TargetError(f"no module named {top!r} (looked in {Path.cwd()} and in sys.path)")


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _hide_our_frames(error: BaseException) -> None:
    """Let the interpreter report `error` as if the script were its outermost frame."""
    report = sys.excepthook

    def without_us(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = report
        if value is error:
            trace = _users_part(trace)
            value = value.with_traceback(trace)
            sys.last_traceback = trace
        report(kind, value, trace)

    sys.excepthook = without_us


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from below the frames of this module on."""
    rest, ours = trace, None
    while rest is not None:
        if rest.tb_frame.f_code.co_filename == _users_part.__code__.co_filename:
            ours = rest
        rest = rest.tb_next
    below = trace if ours is None else ours.tb_next
    while below is not None and below.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
        below = below.tb_next
    return below
