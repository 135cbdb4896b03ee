"""Stack entries of the user's code at an operation of a replay."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from ddpdebug.isolation.user_code import is_user_file, location

_MAX_LINES = 6
_TORCH = ("/torch/", "/ddpdebug/")
_stops: set[CodeType] = set()


def ends_stack(function: object) -> None:
    """Make a function the outermost frame of `user_stack`: the replay's callers did not make the value."""
    _stops.add(function.__code__)  # type: ignore[attr-defined]


def user_stack() -> list[str]:
    """Return `file:line function` of the user's frames inside the replay, innermost first.

    Other packages' frames are among them (a model from a library has its lines there), torch's and ours are not.
    """
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    while frame is not None and frame.f_code not in _stops and len(found) < _MAX_LINES:
        name = frame.f_code.co_filename
        if is_user_file(name) or _is_package(name):
            found.append(f"{location(name, frame.f_lineno)} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found


def _is_package(name: str) -> bool:
    installed = "/site-packages/" in name or "/dist-packages/" in name
    return installed and not any(part in name for part in _TORCH)


def line_of(entry: str) -> str:
    """Return the `file:line` of a stack entry."""
    return entry.rpartition(" ")[0]
