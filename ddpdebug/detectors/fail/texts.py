"""The texts of errors that torch raises, by the table `errors.toml`. Torch-free; without the rules made from it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ddpdebug import detectors
from ddpdebug.schema.ended import Kind, parse_end

#: What ranks end with whose peer has gone, or does not answer: the cause lies elsewhere.
LOSS = "FAIL1024"
OF_VICTIMS = ("FAIL1022", "FAIL1023", LOSS)


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
    return {code: re.compile("|".join(entry.patterns)) for code, entry in table().items()}


@cache
def table() -> dict[str, Entry]:
    """Return the entries by code."""
    text = resources.files(detectors).joinpath("fail/errors.toml").read_text(encoding="utf-8")
    return {code: Entry(**fields) for code, fields in tomllib.loads(text).items()}


@cache
def code_of(reason: str) -> str | None:
    """Return the code of the first rule that knows an error, by the reason `exception: <class>: <text>`."""
    known = parse_end(reason)
    if known.kind not in {Kind.EXCEPTION, Kind.FINDING}:
        return None
    return next((code for code, pattern in _patterns().items() if pattern.search(known.text)), None)


def is_victims(reason: str) -> bool:
    """Whether a rank ends with what ranks end with whose peer has gone, or does not answer."""
    return code_of(reason) in OF_VICTIMS


def is_by_loss(reason: str) -> bool:
    """Whether a rank ends because another one's connection is closed."""
    return code_of(reason) == LOSS
