"""What runs have in common: their facts, and those that a group of runs shares and others do not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from ddpdebug.redaction import redact
from ddpdebug.sinks.text import clean

Facts = Mapping[str, str]
Fact = tuple[str, str]

_MAX_FACTS, _MAX_TEXT, _MAX_SHOWN, _TOGETHER = 400, 200, 6, 3
#: How likely as many runs, picked blindly, would share any of the facts in which runs differ.
_CHANCE = 0.01


def facts(document: Mapping[str, Any]) -> Facts:
    """Return what ran, by name: the script and its arguments, versions, settings and the place; of a `run.json`."""
    found: dict[str, str] = {}

    def add(name: object, value: object) -> None:
        if value not in (None, "") and len(found) < _MAX_FACTS:
            found[clean(name, 80)] = clean(value, _MAX_TEXT)

    command = document.get("command")
    words = redact(list(map(str, command))) if isinstance(command, list) else []
    add("script", words[0] if words else None)
    for name, value in _arguments(words[1:]):
        add(name, value)
    for name, key in (("owner", "owner"), ("ranks", "world"), ("node", "node")):
        add(name, document.get(key))
    for part, prefix in (("place", ""), ("versions", ""), ("config", "ddpdebug ")):
        table = document.get(part)
        for name, value in table.items() if isinstance(table, Mapping) else ():
            add(f"{prefix}{name}", value)
    return found


def _arguments(words: Sequence[str]) -> list[Fact]:
    """Return the options of a command line with their values, `yes` for switches; other words by their place."""
    found: list[Fact] = []
    wants = False
    for place, word in enumerate(words, 1):
        number = word[1:2].isdigit() or word[1:2] == "."
        if word.startswith("-") and not number:
            name, given, value = word.partition("=")
            found.append((name, value if given else "yes"))
            wants = not given
        elif wants:
            found[-1] = found[-1][0], word
            wants = False
        else:
            found.append((f"argument {place}", word))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Facts that all runs of a group share, and always together, and how many of how many other runs have them too."""

    facts: tuple[Fact, ...]
    more: int
    others: int
    of: int


def holders(runs: Mapping[str, Facts]) -> dict[Fact, set[str]]:
    """Return each fact with the runs that have it."""
    found: dict[Fact, set[str]] = {}
    for key, known in runs.items():
        for fact in known.items():
            found.setdefault(fact, set()).add(key)
    return found


def shared(members: set[str], having: Mapping[Fact, set[str]], runs: int) -> list[Shared]:
    """Return what all members have in common and few others have, the most telling first.

    Only what as many runs, picked blindly of all, would hardly share: that is a hint, and no proof.

    Args:
        having: as `holders` returns it for all runs, members and others.
        runs: how many these are.
    """
    if not 2 <= len(members) < runs:
        return []
    told_apart = {name for (name, _), those in having.items() if len(those) < runs}
    seldom = comb(runs, len(members)) * _CHANCE / max(1, len(told_apart))
    by_others: dict[frozenset[str], list[Fact]] = {}
    for fact, those in having.items():
        if members <= those and comb(len(those), len(members)) <= seldom:
            by_others.setdefault(frozenset(those - members), []).append(fact)
    return [
        Shared(
            facts=tuple(told[:_TOGETHER]),
            more=max(0, len(told) - _TOGETHER),
            others=len(others),
            of=runs - len(members),
        )
        for others, told in sorted(by_others.items(), key=lambda item: len(item[0]))
    ][:_MAX_SHOWN]


def differing(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """Return name -> the value of each run, empty where it has none, of the facts in which runs differ."""
    names = dict.fromkeys(name for run in runs for name in run)
    table = [(name, [run.get(name, "") for run in runs]) for name in names]
    return [(name, values) for name, values in table if len({*values}) > 1]
