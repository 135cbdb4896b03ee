"""All thresholds of the rules, by name, and the form in which users adjust them. Torch-free.

A threshold is an attribute of the rule that decides by it. The rules are imported when a threshold
is named, and not before: settings without `--threshold` cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol, overload

from ddpdebug.errors import UsageError, did_you_mean


class _Configured(Protocol):
    config: Mapping[str, Any]


class Threshold:
    """A number that a rule decides by: an attribute of the rule's class, under the name that users adjust it by.

    Read on a rule it is the number itself, as the run's settings (`--threshold NAME=VALUE`) have it. A number that
    several rules read stands in one of them, or in their base, and the others assign it under the same name.

    Args:
        value: the default.
        meaning: what is compared with it, with its unit.
        source: a measurement, a calculation, an argument, a cited figure, or "chosen" and why.
        name: of one that is read where the rule may not be loaded.
    """

    def __init__(self, value: float, meaning: str, *, source: str, name: str = "") -> None:
        self.name = name
        self.value, self.meaning, self.source = float(value), meaning, source

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    @overload
    def __get__(self, rule: None, kind: type) -> Threshold: ...

    @overload
    def __get__(self, rule: _Configured, kind: type) -> float: ...

    def __get__(self, rule: _Configured | None, kind: type) -> Threshold | float:
        """Read the number, once for each rule."""
        if rule is None:
            return self
        value = vars(rule)[self.name] = self.within(rule.config)
        return value

    def within(self, config: Mapping[str, Any]) -> float:
        """Return the number as a run's settings have it."""
        return float((config.get("threshold") or {}).get(self.name, self.value))


@cache
def _by_code() -> Mapping[str, Mapping[str, Threshold]]:
    """Return code -> the thresholds that the rule has."""
    from ddpdebug.detectors.catalog import catalog  # noqa: PLC0415 - settings without thresholds do without the rules

    return {
        rule.code: {
            known.name: known for kind in rule.__mro__ for known in vars(kind).values() if type(known) is Threshold
        }
        for rule in catalog()
    }


@cache
def thresholds() -> Mapping[str, Threshold]:
    """Return every threshold by its name, sorted."""
    found: dict[str, Threshold] = {}
    for name, known in (item for own in _by_code().values() for item in own.items()):
        assert found.setdefault(name, known) is known, f"two thresholds have the name {name}"
    return dict(sorted(found.items()))


def readers(name: str) -> tuple[str, ...]:
    """Return the codes of the rules that have a threshold."""
    return tuple(code for code, own in _by_code().items() if name in own)


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
            near = did_you_mean(str(name), thresholds(), listed="docs/thresholds.md lists all")
            raise UsageError(f"there is no threshold {name!r}; {near}")
        if isinstance(number, bool) or not abs(float(number)) < float("inf"):
            raise ValueError
        found[str(name)] = float(number)
    return found


def _pair(word: Any) -> tuple[str, str]:
    name, equals, number = str(word).partition("=")
    if not equals:
        raise ValueError
    return name.strip(), number
