"""The rows of all ranks for one step, in one order. Torch-free.

A `Step` is what detectors judge; it is built live by the exchange or from the files of a run directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import attrgetter, or_
from typing import Any, TypeVar

from ddpdebug.schema.details import Detail
from ddpdebug.schema.row import CLASS_SLOTS, DIGESTS, Flag, Row

D = TypeVar("D", bound=Detail)
#: Of the rows of more ranks some are chosen: one of each kind of ranks, and those of ranks that are first in something.
FLAT = 64
#: ... which are never more than these.
MOST_CHOSEN = 24
#: Digests that healthy ranks need not have in common, and flags by which they may differ.
_APART = {"batch_digest", "record_digest", "output_digest", "eval_batch_digest", "eval_output_digest", "rng_digest"}
_alike: Callable[[Row], tuple[float, ...]] = attrgetter(*(name for name in DIGESTS if name not in _APART))
_FREE = ~int(Flag.BATCH_GREW | Flag.BATCH_SHRANK | Flag.BATCH_SAMPLED | Flag.SINGLE_CLASS | Flag.NEAR_OVERFLOW)
#: So many groups of ranks are named.
_MAX_SIDES = 4
#: What is added up over all ranks; what is not finite is not counted.
SUMS: Mapping[str, Callable[[Row], float]] = {
    "loss": lambda row: row.loss,
    "squares": lambda row: row.local_grad_norm * row.local_grad_norm,
    "val_loss told": lambda row: math.nan if row.flags & Flag.VAL_LOSS_SEEN else row.val_loss,
    "val_loss seen": lambda row: row.val_loss if row.flags & Flag.VAL_LOSS_SEEN else math.nan,
}


def are_many(ranks: int) -> bool:
    """Whether a job of this many ranks uses the tree, and is judged by chosen rows."""
    return ranks > FLAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The flags and sums over all ranks of a step.

    Args:
        some: flags that some rank has.
        common: flags that every rank has.
        sums: name in `SUMS` -> ranks that know it, and their sum.
    """

    some: int
    common: int
    sums: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of every rank that took part in one optimizer step.

    Args:
        rows: by rank, ascending; ranks that left or never arrived are absent.
        details: what was asked for on suspicion: kind -> rank -> its answer (see `details.py` for the kinds).
        facts: announcements known when the step was judged: topic -> rank -> the newest (see `announcements.py`).
        world: ranks of the job.
        chosen: these are rows of some ranks of very many, in the place of all.
        kinds: of chosen rows, the lowest rank of each kind -> all ranks of it, as far as they are known.
        others: ranks that have taken the step and are of no kind that is known.
        told: of chosen rows, what all ranks say together.
    """

    step: int
    optimizer: int
    world: int
    rows: Mapping[int, Row]
    details: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    chosen: bool = False
    kinds: Mapping[int, frozenset[int]] = field(default_factory=dict)
    others: frozenset[int] = frozenset()
    told: Summary | None = None

    @property
    def complete(self) -> bool:
        """Whether every rank of the job has taken the step."""
        return len(self.everyone if self.chosen else self.rows) == self.world

    @property
    def looks_chosen(self) -> bool:
        """Whether the rows are chosen ones, or so few that they would be taken for chosen ones."""
        return self.chosen or (len(self.rows) <= MOST_CHOSEN and are_many(self.world))

    @cached_property
    def everyone(self) -> frozenset[int]:
        """The ranks that took the step, including those without a row here."""
        return self.others.union(self.rows, *self.kinds.values())

    @cached_property
    def followed(self) -> Mapping[int, Row]:
        """The rows that every step has: of all ranks; of very many, those of the first and of the last rank."""
        if not self.chosen and not are_many(self.world):
            return self.rows
        ends = {min(self.everyone, default=-1), max(self.everyone, default=-1)}
        return {rank: row for rank, row in self.rows.items() if rank in ends}

    @cached_property
    def last(self) -> bool:
        """Whether this is the state after the last step, at the end of the run."""
        return self.any(Flag.LAST_STATE)

    @cached_property
    def parted(self) -> bool:
        """Whether chosen rows show ranks of several kinds."""
        if not self.chosen:
            return False
        return bool(self.others) or len(self.kinds or {kind_of(row) for row in self.rows.values()}) > 1

    @cached_property
    def differing(self) -> frozenset[str]:
        """Names of the digest fields that are known on at least two ranks and not equal on them."""
        if len(self.rows) < 2:
            return frozenset()
        return frozenset(name for name in DIGESTS if len({*self.columns[name]} - {0}) > 1)

    @cached_property
    def columns(self) -> Mapping[str, tuple[Any, ...]]:
        """Every field of the rows as the ranks' values, in the order of `rows`."""
        if not self.rows:
            return dict.fromkeys(Row._fields, ())
        return dict(zip(Row._fields, zip(*self.rows.values(), strict=True), strict=True))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Results that rules have computed about this step, for reuse."""
        return {}

    @cached_property
    def some(self) -> int:
        """The flags of at least one rank, as bits."""
        return reduce(or_, self.columns["flags"], 0) if self.told is None else self.told.some

    def replicas(self, kind: str) -> Mapping[int, Mapping[int, int]]:
        """Return, by key of each class of sharded parameters, the known digests of a kind by rank."""
        found: dict[int, dict[int, int]] = {}
        for rank, row in self.rows.items() if self.any(Flag.SHARDED) else ():
            for slot in range(CLASS_SLOTS):
                key, digest = getattr(row, f"class_{slot}_key"), getattr(row, f"class_{slot}_{kind}")
                if key and digest:
                    found.setdefault(key, {})[rank] = digest
        return found

    def values(self, name: str) -> dict[int, list[int]]:
        """Return value -> ranks for a digest field, leaving out ranks that did not compute it."""
        found: dict[int, list[int]] = {}
        for rank, value in self._shown(name).items():
            found.setdefault(value, []).append(rank)
        return found

    def known(self, name: str) -> bool:
        """Whether every rank of the step computed the digest field."""
        return 0 not in self.columns[name]

    def agrees(self, name: str) -> bool:
        """Whether the digest field is known on every rank and equal."""
        return self.known(name) and name not in self.differing

    def total(self, name: str) -> tuple[int, float]:
        """Return the number of ranks that know a value of `SUMS`, and its sum over them."""
        if self.told is not None:
            return self.told.sums[name]
        if (found := self._totals.get(name)) is None:
            values = [value for value in map(SUMS[name], self.rows.values()) if math.isfinite(value)]
            found = self._totals[name] = len(values), math.fsum(values)
        return found

    @cached_property
    def _totals(self) -> dict[str, tuple[int, float]]:
        return {}

    @cached_property
    def mean_loss(self) -> float | None:
        """The mean loss over the ranks; None if a rank has no finite loss."""
        count, total = self.total("loss")
        return total / count if count and count == len(self.everyone) else None

    def row_of(self, rank: int) -> Row:
        """Return the row of a rank, or of the rank that represents its kind."""
        lowest = next((lowest for lowest, ranks in self.kinds.items() if rank in ranks), rank)
        return self.rows[rank if rank in self.rows else lowest]

    def groups(self, name: str) -> dict[int, frozenset[int]]:
        """Return value -> ranks for a digest field that is equal within each kind of ranks; 0 included."""
        found: dict[int, frozenset[int]] = {}
        kinds = self.kinds if self.chosen else {}
        alone = {rank: frozenset({rank}) for rank in self.rows if not any(rank in ranks for ranks in kinds.values())}
        for rank, ranks in {**kinds, **alone}.items():
            value = getattr(self.rows[rank], name)
            found[value] = found.get(value, frozenset()) | ranks
        return found

    def minority(self, name: str) -> Blamed:
        """Return the ranks outvoted on a digest field; all ranks without a majority."""
        return outvoted(self._shown(name))

    def _shown(self, name: str) -> dict[int, int]:
        """Return rank -> its value of a field, of ranks that know it; a kind has the value of its lowest rank."""
        found = {rank: getattr(row, name) for rank, row in self.rows.items()}
        for lowest, ranks in self.kinds.items():
            found |= dict.fromkeys(ranks - found.keys(), found[lowest])
        return {rank: found[rank] for rank in sorted(found) if found[rank]}

    def any(self, flag: Flag) -> bool:
        """Whether some rank has the flag."""
        return bool(self.some & int(flag))  # operators of IntFlag are slow

    def all(self, flag: Flag) -> bool:
        """Whether every rank has the flag."""
        bits = int(flag)
        if self.told is not None and bits & (bits - 1) == 0:
            return bool(self.told.common & bits)
        return bool(self.some & bits) and all(flags & bits for flags in self.columns["flags"])

    def ranks_with(self, flag: Flag) -> tuple[int, ...]:
        """Return the ranks that have the flag."""
        bits = int(flag)
        if not self.some & bits:
            return ()
        found = {rank for rank, row in self.rows.items() if row.flags & bits}
        if bits & _FREE:  # a kind has it, or has not
            found = found.union(*(ranks for lowest, ranks in self.kinds.items() if lowest in found))
        return tuple(sorted(found))

    def answers(self, kind: type[D]) -> Mapping[int, D]:
        """Return the answers of the ranks to a kind of detail of this step, by rank."""
        found: Mapping[int, Any] = self.details.get(kind.kind, {})  # instances of the kind, under its name
        return dict(sorted(found.items()))  # live, ranks answer in any order

    def with_details(self, details: Mapping[str, Mapping[int, Detail]]) -> Step:
        """Return this step with the given details added."""
        return replace(self, details={**self.details, **details})


class Signs:
    """Possible signs in steps as bits of one number: flags, and columns that are known or differ.

    Args:
        names: the flags and columns that count.
    """

    def __init__(self, names: Iterable[str | Flag]) -> None:
        names = set(names)
        self._flags = reduce(or_, (int(name) for name in names if not isinstance(name, str)), 0)
        columns = sorted(name for name in names if isinstance(name, str))
        self._columns = {name: 1 << (_FIRST_COLUMN + 2 * i) for i, name in enumerate(columns)}

    def of(self, names: Iterable[str | Flag], *, differing: bool) -> int:
        """Return the bits of flags and columns; with `differing`, for a digest only the bit for a difference."""
        found = 0
        for name in names:
            if not isinstance(name, str):
                found |= int(name)
            else:
                found |= self._columns[name] << (differing and name in DIGESTS)
        return found

    def shown(self, step: Step) -> int:
        """Return the signs in a step: flags that some rank has, and columns that some rank knows."""
        found, several, columns = step.some & self._flags, len(step.rows) > 1, step.columns
        for name, bit in self._columns.items():
            column = columns[name]
            if not all(map(math.isnan, column)) if name in _FLOATS else any(column):
                found |= bit | (bit << 1 if several and name in step.differing else 0)
        return found


_FIRST_COLUMN = max(Flag).bit_length()
_FLOATS = frozenset(name for name, default in Row._field_defaults.items() if isinstance(default, float))


def kind_of(row: Row) -> tuple[float, ...]:
    """Return the values that healthy ranks have in common in a step; ranks with equal values are of one kind."""
    scale = row.loss_scale if math.isfinite(row.loss_scale) else 0.0
    return (row.flags & _FREE, scale, *_alike(row))


def step_of(optimizer: int, step: int, rows: Mapping[int, Row], world: int) -> Step:
    """Return the step from rows by rank; few rows of very many ranks count as chosen ones."""
    rows = dict(sorted(rows.items()))
    found = Step(step=step, optimizer=optimizer, world=world, rows=rows)
    return replace(found, chosen=found.looks_chosen)


class Blamed(tuple[int, ...]):  # noqa: SLOT001 - of a tuple they are empty
    """The ranks that a vote blames: those outside the largest group of equals; all ranks without a majority."""

    #: The groups of equals, the largest first, without a majority; some of them where there are many.
    undecided: tuple[tuple[int, ...], ...] = ()


def outvoted(values: Mapping[int, object]) -> Blamed:
    """Return the ranks whose value differs from that of the largest group of equals; empty if all are equal.

    Where two groups are the largest none is a majority, and all ranks are returned: so with two ranks, and
    where each has a value of its own.
    """
    groups = sides(values)
    if len(groups) < 2:
        return Blamed()
    if len(groups[0]) > len(groups[1]):
        return Blamed(sorted(rank for group in groups[1:] for rank in group))
    blamed = Blamed(sorted(values))
    blamed.undecided = (*map(tuple, groups[:_MAX_SIDES]),)
    return blamed


def sides(values: Mapping[int, object]) -> list[list[int]]:
    """Return the groups of ranks that have equal values, the largest first."""
    votes: dict[object, list[int]] = {}
    for rank in sorted(values):
        votes.setdefault(values[rank], []).append(rank)
    return sorted(votes.values(), key=lambda group: (-len(group), group))
