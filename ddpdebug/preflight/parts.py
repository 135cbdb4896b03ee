"""The parts of a group of checks, each of which may fail without the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ddpdebug.errors import UsageError
from ddpdebug.isolation.user_code import is_user_file, location
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.sandbox.process_state import TimeUp


def each(group: str, **parts: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return what the parts say; one that raises is skipped, under its name, and says why."""
    found: list[Check] = []
    for name, part in parts.items():
        try:
            found += part()
        except TimeUp:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's model, or ours: no preflight ends in a traceback
            title = name.replace("_", " ")
            found.append(Check(group=group, name=title, status=Status.SKIPPED, summary=reason(error)))
    return found


def reason(error: Exception) -> str:
    """Say what was raised and where: in the user's code if it was there."""
    if isinstance(error, TimeUp | UsageError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame: Any = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1] if frames else None)
    place = "" if frame is None else f" ({location(frame.filename, frame.lineno or 0)})"
    return f"could not be done: {type(error).__name__}: {error}{place}"
