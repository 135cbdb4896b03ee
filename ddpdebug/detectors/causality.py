"""The order of causes, from `causality.toml`: which phase a code belongs to, and which codes explain it. Torch-free."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ddpdebug import detectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The phases, upstream first, and the relation between their codes."""

    phases: Mapping[str, tuple[str, ...]]  # name -> codes
    groups: Mapping[str, tuple[str, ...]]
    explained_by: Mapping[str, frozenset[str]]  # code -> codes, those against the order too
    against: Mapping[str, frozenset[str]]  # code -> codes that stand downstream of it and explain it all the same
    ranks: Mapping[str, int]  # code, or name of a phase -> place


@cache
def order() -> Order:
    """Return the order; read when first needed."""
    text = resources.files(detectors).joinpath("causality.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


def parse(tables: Mapping[str, Any]) -> Order:
    """Return the order that a file gives.

    Raises:
        KeyError: a row names no code, phase or group of the file.
    """
    rows: dict[str, Mapping[str, list[str]]] = {
        name: table for name, table in tables.items() if name not in {"groups", "against"}
    }
    phases = {name: tuple(code for code in table if code != "every") for name, table in rows.items()}
    names: dict[str, tuple[str, ...]] = {code: (code,) for codes in phases.values() for code in codes} | phases
    for name, members in tables["groups"].items():
        names[name] = tuple(_codes(members, names))
    explained: dict[str, frozenset[str]] = {}
    for name, codes in phases.items():
        for code in codes:
            own = [*rows[name].get("every", ()), *rows[name][code]]
            explained[code] = frozenset(_codes(own, names)) - {code}
    against: dict[str, frozenset[str]] = {}
    for entry in tables["against"]:
        for code in _codes(entry["codes"], names):
            against[code] = frozenset(_codes(entry["by"], names)) - {code}
            explained[code] |= against[code]
    ranks = {name: rank for rank, (phase, codes) in enumerate(phases.items()) for name in (phase, *codes)}
    groups = {name: names[name] for name in tables["groups"]}
    return Order(phases=phases, groups=groups, explained_by=explained, against=against, ranks=ranks)


def rank(name: str) -> int:
    """Return the place of a code or a phase, upstream is smaller; a code without a row comes last."""
    return order().ranks.get(name, len(order().phases))


def explained_by(code: str) -> frozenset[str]:
    """Return the codes that explain a code."""
    return order().explained_by.get(code, frozenset())


def group(name: str) -> tuple[str, ...]:
    """Return the codes of a group."""
    return order().groups[name]


def _codes(names: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name in names:
        yield from known[name]
