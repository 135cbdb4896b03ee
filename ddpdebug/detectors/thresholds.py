"""The numbers that rules compare with, from `thresholds.toml`: value, meaning, source. Torch-free.

Rules read them through `Detector.limit`; users adjust them with `--threshold NAME=VALUE`. docs/thresholds.md is made
from the same file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ddpdebug import detectors
from ddpdebug.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One number, and where it comes from."""

    name: str
    value: float
    meaning: str  # with its unit
    source: str
    codes: tuple[str, ...]


@cache
def thresholds() -> Mapping[str, Threshold]:
    """Return every threshold by its name, in the order of the file; read when first needed."""
    text = resources.files(detectors).joinpath("thresholds.toml").read_text(encoding="utf-8")
    return {
        name: Threshold(
            name=name,
            value=float(table["value"]),
            meaning=str(table["meaning"]),
            source=str(table["source"]),
            codes=tuple(table["codes"]),
        )
        for name, table in tomllib.loads(text).items()
    }


def threshold(config: Mapping[str, Any], name: str) -> float:
    """Return a threshold as the run's settings have it."""
    own: Mapping[str, float] = config.get("threshold") or {}
    return float(own[name]) if name in own else thresholds()[name].value


def assignments(value: Any) -> dict[str, float]:
    """Read thresholds: a table, texts NAME=VALUE, or one text with commas between them.

    Raises:
        UsageError: there is no threshold of that name.
        ValueError: something is no NAME=VALUE with a finite number.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        words: Iterable[Any] = value.split(",") if isinstance(value, str) else value
        pairs = [_pair(word) for word in words]
    found = {}
    for name, number in pairs:
        if name not in thresholds():
            raise UsageError(f"there is no threshold {name!r}; {did_you_mean(str(name), thresholds())}")
        if isinstance(number, bool) or not abs(float(number)) < float("inf"):
            raise ValueError
        found[str(name)] = float(number)
    return found


def _pair(word: Any) -> tuple[str, str]:
    name, equals, number = str(word).partition("=")
    if not equals:
        raise ValueError
    return name.strip(), number
