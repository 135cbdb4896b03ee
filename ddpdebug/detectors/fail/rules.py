"""The rules about errors that torch raises, made from the table `errors.toml`. Torch-free."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ddpdebug import detectors
from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Finding, Severity
from ddpdebug.schema.announcements import Failure

_MAX_TEXT = 400
_PREFIX = "exception: "


class TorchError(EventRule):
    """Base of the rules about errors: a rank has ended with an exception whose text is known."""

    severity = Severity.CRITICAL
    events = ("failure",)

    def judge(self, fact: Failure) -> Fields | None:
        if code_of(fact.reason) != self.code:
            return None
        named = fact.named or (fact.missing if self.code == "FAIL1001" else ())
        evidence: dict[str, Any] = {"error": fact.reason.removeprefix(_PREFIX)[:_MAX_TEXT]}
        if fact.module is not None:
            evidence["module"] = fact.module
        return {"step": fact.raised_in, "phase": fact.phase, "subject": named[:MAX_NAMES], "evidence": evidence}

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return ()  # the same on every rank is one cause; who was first is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the table: see its head."""

    title: str
    patterns: list[str]
    examples: list[str]
    meaning: str
    impact: str
    diagnosis: str
    causes: list[str]
    remedy: list[str]


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
    return {code: re.compile("|".join(entry.patterns)) for code, entry in _table().items()}


@cache
def _table() -> dict[str, Entry]:
    text = resources.files(detectors).joinpath("fail/errors.toml").read_text(encoding="utf-8")
    return {code: Entry(**fields) for code, fields in tomllib.loads(text).items()}


@cache
def code_of(reason: str) -> str | None:
    """Return the code of the first rule that knows an error, by the reason `exception: <class>: <text>`."""
    if not reason.startswith(_PREFIX):
        return None
    text = reason.removeprefix(_PREFIX)
    return next((code for code, pattern in _patterns().items() if pattern.search(text)), None)


def _prose(entry: Entry) -> str:
    def bullets(items: Iterable[str]) -> str:
        return "\n".join(f"    - {item}" for item in items)

    return (
        f"{entry.meaning}\n\n    Impact: {entry.impact}\n\n    Diagnosis: {entry.diagnosis}\n\n"
        f"    Causes:\n{bullets(entry.causes)}\n\n    Remedy:\n{bullets(entry.remedy)}\n    "
    )


_KNOWN = {"step": 4, "raised_in": 5, "location": "train.py:40", "phase": "forward", "named": ["fc.weight"]}


def _ends_with(reason: str, **known: Any) -> Facts:
    return Facts(topic="alone:failure", values={1: {"reason": f"{_PREFIX}{reason}", **known}})


def _rule(code: str, entry: Entry) -> type[TorchError]:
    fields = {
        "__module__": __name__,
        "__doc__": _prose(entry),
        "code": code,
        "title": entry.title,
        "fires_on": Examples(
            lambda: tuple((_ends_with(text, **known),) for text in entry.examples for known in ({}, _KNOWN))
        ),
        "silent_on": Examples(
            lambda: _ends_with("KeyError: 'labels'"),
            lambda: _ends_with("RuntimeError: the user's own"),
            lambda: steps(3),
        ),
    }
    return type(code, (TorchError,), fields)


globals().update({code: _rule(code, entry) for code, entry in _table().items()})
