"""Matching of the entry names of two states, though wrappers have lengthened some. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

#: What DDP, `torch.compile`, FSDP1 and activation checkpointing put into names.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of one side's names that the other side's names do not have."""

    side: str  # "a" or "b"
    part: str  # with its dot
    count: int


@dataclass(frozen=True, slots=True)
class Pairing:
    """Matched names, names of one side only, and the parts of names that were ignored for matching."""

    pairs: Mapping[str, str]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def pair(a: Collection[str], b: Collection[str], *, prefixes: bool) -> Pairing:
    """Match the names of two states: equal names, then equal ones without wrappers, then those under one prefix.

    Args:
        prefixes: whether one side may have all its names under a prefix of its own, `model.` for example.
    """
    pairs = {name: name for name in a if name in b}
    rest_a, rest_b = _by_short_name(a, pairs), _by_short_name(b, pairs)
    left: Counter[tuple[str, str]] = Counter()
    prefix_a, prefix_b = ("", "")
    if prefixes and not rest_a.keys() & rest_b.keys():
        prefix_a, prefix_b = _prefix(rest_b, rest_a), _prefix(rest_a, rest_b)
        if len(prefix_a) and len(prefix_b):
            prefix_b = ""
    for short, name in rest_a.items():
        if not short.startswith(prefix_a):
            continue
        other = rest_b.get(prefix_b + short.removeprefix(prefix_a))
        if other is not None:
            pairs[name] = other
            left.update({("a", part) for part in _wrappers(name) - _wrappers(other)})
            left.update({("b", part) for part in _wrappers(other) - _wrappers(name)})
            left.update({("a", prefix_a)} if prefix_a else ())
            left.update({("b", prefix_b)} if prefix_b else ())
    known = set(pairs.values())
    return Pairing(
        pairs,
        tuple(name for name in a if name not in pairs),
        tuple(name for name in b if name not in known),
        tuple(LeftOut(side, part, count) for (side, part), count in sorted(left.items())),
    )


def _wrappers(name: str) -> set[str]:
    return {f"{part}." for part in name.split(".") if part in WRAPPERS}


def _by_short_name(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return the names that are not paired yet by what is left of them without wrappers, where that is unique."""
    shorts = [(".".join(part for part in name.split(".") if part not in WRAPPERS), name) for name in names]
    counts = Counter(short for short, _ in shorts)
    return {short: name for short, name in shorts if counts[short] == 1 and name not in known}


def _prefix(shorter: Collection[str], longer: Collection[str]) -> str:
    """Return the prefix under which most of the shorter names are among the longer, if it is half of them at least."""
    counts = Counter(prefix for name in longer for prefix in _prefixes(name) if name.removeprefix(prefix) in shorter)
    prefix, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return prefix if 2 * count >= min(len(shorter), len(longer)) else ""


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]) + "."
