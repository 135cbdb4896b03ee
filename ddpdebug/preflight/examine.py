"""Runs the groups of checks one after the other, on copies and within a time limit."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ddpdebug import torch_internals as internals
from ddpdebug.errors import UsageError
from ddpdebug.isolation.process_state import preserved
from ddpdebug.isolation.user_code import is_user_file, location
from ddpdebug.preflight.output.results import GROUPS, Check, Status, chosen, named
from ddpdebug.preflight.sandbox.time_limit import TimeUp, time_limit
from ddpdebug.preflight.subject import Subject

#: Seconds for each group: together a preflight that people wait for, where a step takes a second or two.
_SECONDS = 60.0


def examine(
    subject: Subject, groups: Sequence[str] | None = None, begins: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """Run the groups of checks, all by default, and return the results; a check that raises is skipped with its reason.

    Args:
        begins: called with the name of a group before its checks.

    Raises:
        UsageError: this process is one of several ranks that somebody trains with.
    """
    if internals.is_one_of_several() and not internals.is_claimed():
        raise UsageError(
            "preflight runs the loss as a world of one rank, which one of several that train must not be; call it "
            "before init_process_group, or run `ddpdebug preflight --nproc-per-node N script.py`"
        )
    wanted = list(GROUPS) if groups is None else chosen(",".join(groups))
    checks: list[Check] = []
    with internals.one_rank():
        for group in GROUPS:
            if group in wanted:
                begins(group)
                checks += _guarded(group, subject)
    return checks


def _guarded(group: str, subject: Subject) -> list[Check]:
    try:
        check = importlib.import_module(f"ddpdebug.preflight.checks.{GROUPS[group]}").check
        with preserved(plain=True), time_limit(_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns about the script has said already, or is found here
            found: list[Check] = check(subject)
    except Exception as error:  # noqa: BLE001 - the caller's model, or ours: no preflight ends in a traceback
        found = [Check(Status.SKIPPED, reason(error), name="run")]
    return [replace(check, group=group) for check in found]


def each(**parts: Callable[[], Iterable[Check]]) -> list[Check]:
    """Run parts of a check and return the results under the parts' names; a part that raises is skipped."""
    found: list[Check] = []
    for part, look in parts.items():
        own: list[Check] = []
        try:
            own.extend(look())
        except TimeUp:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's model, or ours: no preflight ends in a traceback
            own.append(Check(Status.SKIPPED, reason(error)))
        found += named(part.replace("_", " "), own)
    return found


def reason(error: Exception) -> str:
    """Return the text of an error with its `file:line`, in the user's code if its traceback contains any."""
    if isinstance(error, TimeUp | UsageError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame: Any = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1] if frames else None)
    place = "" if frame is None else f" ({location(frame.filename, frame.lineno or 0)})"
    return f"could not be done: {type(error).__name__}: {error}{place}"
