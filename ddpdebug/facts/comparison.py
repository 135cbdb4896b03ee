"""The facts of a run directory or a file, and differences between those of two runs. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ddpdebug.errors import UsageError
from ddpdebug.facts import movement, ranks, samples, scale
from ddpdebug.facts.fact import CONTRACTS, MAX_FACTS, Fact, Facts, read_file
from ddpdebug.facts.seen import read

Key = tuple[int, str, str]
_KINDS = (movement.facts, samples.facts, scale.facts, ranks.facts)
#: Subjects that are named of a difference.
_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact that differs between two runs.

    Args:
        about: what has changed alike, together.
        subjects: the first ones of it.
        one: the value in the first run; None where it says nothing.
        other: the value in the second one.
        step: by which both runs had shown it.
    """

    contract: int
    statement: str
    about: str
    subjects: tuple[str, ...]
    number: int
    one: str | None
    other: str | None
    step: int
    place: str | None = None

    @property
    def words(self) -> str:
        """The difference in words."""
        values = f"was {self.one}, now {self.other}"
        if self.other is None:
            values = f"was {self.one}, now nothing is known of it"
        elif self.one is None:
            values = f"is new: {self.other}"
        return f"{f'{self.about}: ' if self.about else ''}{self.statement} {values}"


def facts_of(path: Path) -> Facts:
    """Return the facts of a run directory or of a facts file.

    Raises:
        UsageError: there is no such run, it has no steps, or the file holds no facts.
    """
    if not path.is_dir():
        return read_file(path)
    try:
        seen = read(path)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if not seen.steps:
        raise UsageError(f"the run in {str(path)!r} has recorded no steps: nothing is known of it")
    known = dict[Key, Fact]()
    for kind in _KINDS:
        for fact in kind(seen):
            known.setdefault(fact.key, fact)
    ordered = sorted(known.values(), key=lambda fact: fact.contract)[:MAX_FACTS]
    return Facts(world=seen.world, steps=seen.last + 1, facts=tuple(ordered))


def differences(one: Facts, other: Facts) -> list[Difference]:
    """Return the facts that differ between two runs, in the order of the contracts, as far as both runs came."""
    left, right = ({fact.key: fact for fact in facts.facts} for facts in (one, other))
    alike: dict[tuple[int, str, str | None, str | None], list[tuple[Fact, int]]] = defaultdict(list)
    for key in {**left, **right}:
        a, b = left.get(key), right.get(key)
        fact = a or b
        assert fact is not None
        if (fact.of_world and one.world != other.world) or not _differ(a, b, left, right, min(one.steps, other.steps)):
            continue
        values = (None if a is None else a.shown, None if b is None else b.shown)
        step = max(known.first for known in (a, b) if known is not None)
        alike[(fact.contract, fact.statement, *values)].append((b or fact, step))
    found = [
        Difference(
            contract=contract,
            statement=statement,
            about=_together([fact.subject for fact, _ in group]),
            subjects=tuple(fact.subject for fact, _ in group[:_NAMED]),
            number=len(group),
            one=was,
            other=now,
            step=min(step for _, step in group),
            place=next((fact.place for fact, _ in group if fact.place), None),
        )
        for (contract, statement, was, now), group in alike.items()
    ]
    return sorted(found, key=lambda difference: (difference.contract, None in {difference.one, difference.other}))


def _differ(a: Fact | None, b: Fact | None, left: Mapping[Key, Fact], right: Mapping[Key, Fact], steps: int) -> bool:
    if a is not None and b is not None:
        if a.first > b.last or b.first > a.last:
            return False
        if isinstance(a.value, str) or isinstance(b.value, str):
            return a.value != b.value
        small, large = sorted((abs(a.value), abs(b.value)))
        return a.value * b.value < 0 or large > max(a.within, b.within) * small
    fact, others = (a, right) if a is not None else (b, left)
    assert fact is not None
    if not isinstance(fact.value, str) or fact.first >= steps:
        return False  # numbers are there where they could be measured
    return any(other.statement == fact.statement for other in others.values())


def _together(subjects: Sequence[str]) -> str:
    """Name several subjects by what their paths have in common, if anything."""
    if len(subjects) < 2:
        return subjects[0]
    paths = [subject.split(".") for subject in subjects]
    common = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    return f"{common} ({len(subjects)})" if common else f"{subjects[0]} and {len(subjects) - 1} more"


def listed(facts: Facts) -> Iterator[str]:
    """Yield the facts as lines under the names of their contracts; subjects with equal facts share a line."""
    alike, contract = defaultdict[tuple[int, str, str], list[str]](list), 0
    for fact in facts.facts:
        alike[fact.contract, fact.statement, fact.shown].append(fact.subject)
    for (number, statement, shown), subjects in alike.items():
        if number != contract:
            contract = number
            yield f"{contract}. {CONTRACTS[contract]}"
        what = _together(subjects)
        yield f"   {f'{what}: ' if what else ''}{statement}: {shown}"
