"""Lines of source files, out of a cache of our own: what `linecache` has read is the script's, and may go stale."""

from __future__ import annotations

import importlib.util
import linecache
from typing import Any


def _another() -> Any:
    spec: Any = linecache.__spec__
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_own = _another()


def getlines(file: str, space: dict[str, Any] | None = None) -> list[str]:
    """Return what `linecache.getlines` would, and leave its cache as it is; that knows code that is in no file."""
    known: Any = linecache.cache.get(file)
    if known is not None and len(known) > 1:
        return list(known[2])
    if known is not None:  # how to read it is known
        _own.cache.setdefault(file, known)
    lines: list[str] = _own.getlines(file, space)
    return lines


def getline(file: str, line: int) -> str:
    """Return a line, empty if there is none."""
    lines = getlines(file)
    return lines[line - 1] if 0 < line <= len(lines) else ""
