"""The records of a run directory that its facts are derived from: a bounded part of all records. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ddpdebug.facts.fact import Fact
from ddpdebug.run_directory.reader import numbered_steps, read_observations, read_run
from ddpdebug.schema.announcements import Announcement, read_announcement
from ddpdebug.schema.details import Detail, read_detail
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step

#: Of longer runs the facts are those of these steps of each optimizer.
_MAX_STEPS, _MAX_SAID = 2000, 50_000

A = TypeVar("A", bound=Announcement)
D = TypeVar("D", bound=Detail)


class Said(NamedTuple, Generic[A]):
    """An announcement of a rank: the number behind its topic, its value, and the step by which it was known."""

    rank: int
    number: int
    value: A
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The records of a run.

    Args:
        steps: of each optimizer.
        said: announcements in the order in which they came.
        answers: (optimizer, step, rank, detail), likewise.
    """

    world: int
    steps: Mapping[int, Sequence[Step]]
    said: Sequence[Said[Any]] = ()
    answers: Sequence[tuple[int, int, int, Detail]] = ()

    @property
    def last(self) -> int:
        """The newest step of all optimizers."""
        return max((steps[-1].step for steps in self.steps.values() if steps), default=0)

    def fact(
        self, contract: int, subject: str, statement: str, value: str | float, first: int = 0, **more: Any
    ) -> Fact:
        """Return a fact that was known at a step and held until the end."""
        last = max(first, self.last)
        return Fact(
            contract=contract, subject=subject, statement=statement, value=value, first=first, last=last, **more
        )

    def of(self, kind: type[A]) -> list[Said[A]]:
        """Return the announcements of one class."""
        return [one for one in self.said if isinstance(one.value, kind)]

    def first_rank(self, kind: type[A]) -> list[Said[A]]:
        """Return the announcements of one class by the lowest rank that has made any."""
        found = self.of(kind)
        lowest = min((one.rank for one in found), default=0)
        return [one for one in found if one.rank == lowest]

    def details(self, kind: type[D]) -> Iterator[tuple[int, int, D]]:
        """Yield (optimizer, step, detail) of one class, by each optimizer's lowest rank that has given any."""
        found = [(optimizer, step, rank, one) for optimizer, step, rank, one in self.answers if isinstance(one, kind)]
        lowest: dict[int, int] = {}
        for optimizer, _, rank, _ in found:
            lowest[optimizer] = min(rank, lowest.get(optimizer, rank))
        return ((optimizer, step, one) for optimizer, step, rank, one in found if lowest[optimizer] == rank)


def read(directory: Path) -> Seen:
    """Read the records of a run directory.

    Raises:
        ValueError: it is not that of a run, or its rows have the layout of another version.
    """
    run, steps = read_run(directory), defaultdict[int, list[Step]](list)
    numbers, newest = [0], [0]  # of rows, and the newest step before them
    for at, taken in numbered_steps(directory):
        numbers.append(at + 1)
        newest.append(max(newest[-1], taken.step))
        if len(steps[taken.optimizer]) < _MAX_STEPS and not taken.any(Flag.ALONE | Flag.LAST_STATE):
            steps[taken.optimizer].append(taken)
    said, answers = list[Said[Any]](), list[tuple[int, int, int, Detail]]()
    for one in read_observations(directory):
        payload = one.payload
        ranks = payload.get("ranks", [payload.get("rank")])
        rank = min((r for r in ranks if isinstance(r, int)), default=None) if isinstance(ranks, list) else None
        if rank is None or len(said) + len(answers) > _MAX_SAID:
            continue
        topic, optimizer, step = (payload.get(name) for name in ("topic", "optimizer", "step"))
        if one.kind == "fact" and isinstance(topic, str):
            if (announcement := read_announcement(topic, payload.get("value"))) is not None:
                number = topic.rpartition(":")[2]
                heard = newest[bisect_right(numbers, one.rows) - 1]
                step = getattr(announcement, "step", None)
                about = int(number) if number.isdecimal() else 0
                said.append(Said(rank, about, announcement, max(0, step) if isinstance(step, int) else heard))
        elif one.kind == "detail" and isinstance(optimizer, int) and isinstance(step, int) and not payload.get("last"):
            detail = read_detail(str(payload.get("detail")), payload.get("value"))
            answers += [(optimizer, step, rank, detail)] if detail is not None else []
    kept = {optimizer: sorted(own, key=lambda taken: taken.step) for optimizer, own in sorted(steps.items()) if own}
    world = run.get("world") or max((len(own[0].rows) for own in kept.values()), default=1)
    return Seen(world=world, steps=kept, said=said, answers=answers)


def lowest(step: Step) -> Row:
    """Return the row of the lowest rank of a step."""
    return step.rows[min(step.rows)]


def column(steps: Iterable[Step], name: str) -> Iterator[tuple[int, Any]]:
    """Yield (step, value of the lowest rank) of a column, if the value is known: neither NaN nor a digest of 0."""
    for step in steps:
        value = getattr(lowest(step), name)
        if value == value and not (name.endswith("_digest") and value == 0):  # noqa: PLR0124 - NaN
            yield step.step, value
