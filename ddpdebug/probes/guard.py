"""Isolation and timing of probes: a probe that fails switches itself off, says so once, and the job goes on."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

#: To a dictionary of locals that nobody else holds: by the frame, by our name, by the call that counts.
_OWN_REFERENCES = 3
_OWN = str(Path(__file__).resolve().parent.parent) + "/"


class Guard:
    """Runs probe code. Counts the time spent in it (`seconds`) and remembers which parts are off.

    Args:
        on_trouble: called once per failing part with (part, message).
    """

    def __init__(self, on_trouble: Callable[[str, str], None]) -> None:
        self.seconds = 0.0
        self.off: set[str] = set()
        self.quiet = False  # a replay is running: what it does is no part of the training
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

    def run(self, part: str, probe: Callable[..., Any], *args: Any) -> Any:
        """Return `probe(*args)`, or None when the part is off or fails."""
        if part in self.off or (self.quiet and part.startswith("probe:")):
            return None
        outermost = self._depth == 0
        self._depth += 1
        if outermost:
            self._entered = time.perf_counter()
        try:
            return probe(*args)
        except Exception as error:  # noqa: BLE001 - the whole point: nothing of ours reaches the job
            self.fail(part, error)
            return None
        finally:
            self._depth -= 1
            if outermost:
                self.seconds += time.perf_counter() - self._entered

    def forgive(self, seconds: float) -> None:
        """Take time back that was spent waiting for other ranks: it is no cost of looking."""
        self.seconds -= seconds

    def tell(self, part: str, message: str) -> None:
        """Report something that is not looked at."""
        self._on_trouble(part, message)

    def fail(self, part: str, error: Exception) -> None:
        """Switch a part off and report it once."""
        if part not in self.off:
            self.off.add(part)
            self._on_trouble(part, f"{type(error).__name__}: {error}")


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


@lru_cache(maxsize=1024)
def shorten(name: str) -> str:
    """Return a file's path from the current directory, if it lies below it."""
    try:
        return str(Path(name).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return name
