"""The parts of each rank's steps over a run, and the cost of slow ranks, in bounded memory. Torch-free."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from ddpdebug.schema import pace
from ddpdebug.schema.robust import spread
from ddpdebug.schema.step import Step

#: A run has so many spans of steps at most, and at least half as many once it is long enough.
SPANS = 120
#: So many rows at most: beyond them neighbours share one.
ROWS = 64
_MAX_RANKS = 4096
#: Of so many ranks at least one is unlike the others beyond so many times the median distance from their middle: four
#: standard deviations, were they normally distributed.
_ENOUGH, _UNLIKE = 8, 4
#: What is summed of a rank: steps, those of which it is known how long it waited for data, their time, its own time,
#: and the phases of that.
_COUNT, _FED, _STEP, _OWN, _PHASES = 0, 1, 2, 3, 4
_SUMS = _PHASES + len(pace.PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The times of one rank in a span of steps.

    Args:
        own: mean seconds of a step.
        excess: what of them the median rank did not take, as a share of the step.
        noise: the excess up to which the rank is like the others in that span.
        phase: in which most of the excess was.
    """

    rank: int
    own: float
    excess: float
    noise: float
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """The times of one rank over all recorded steps; seconds are means, over steps with the rows of all ranks.

    They are NaN where no such step has the rank.
    """

    rank: int
    cost: float  # seconds in all
    share: float  # ... of the time of the steps
    last: float  # share of the steps in which it was the slowest
    own: float
    excess: float
    phase: str


class PaceHistory:
    """The own times of all ranks, summed over spans of steps that are joined as the run grows.

    Ranks are compared in whole steps. Of very many ranks most steps have a few rows, of ranks that were first in
    something: these tell what the slowest cost, and the lowest rank, which is always there, how long the step took.

    Attributes:
        steps: that were looked at.
        whole: those of them that have the rows of all ranks.
        ranks: how many were seen, or would be if none were missing in between.
    """

    def __init__(self) -> None:
        self.steps = self.whole = self.ranks = 0
        self._width = 1  # steps of a span
        self._spans: list[tuple[int, int, array[float]]] = []  # first step, last step, sums of rank after rank
        self._open = 0  # steps in the newest span
        self._lowest = array("d")  # sums of the lowest rank in steps of chosen rows
        self._costs: dict[int, float] = {}
        self._lasts: dict[int, int] = {}
        self._waited = self._length = 0.0  # seconds of all steps, of the mean rank

    def add(self, step: Step) -> None:
        """Add a step; the first one, and one of unknown time, are left out."""
        own = {rank: seconds for rank, seconds in pace.own_times(step).items() if rank < _MAX_RANKS}
        timed = [rank for rank in own if rank == min(step.rows) or not step.chosen]
        if not timed:
            return
        if not self._spans or self._open >= self._width:
            self._spans.append((step.step, step.step, array("d")))
            self._open = 0
        first, _, spanned = self._spans[-1]
        sums = self._lowest if step.chosen else spanned
        for rank in timed:
            if (missing := (rank + 1) * _SUMS - len(sums)) > 0:
                sums.extend([0.0] * missing)
            row, at = step.rows[rank], rank * _SUMS
            fed = float(row.data_seconds >= 0)
            for i, value in enumerate((1.0, fed, row.step_seconds, own[rank], *row.own_phases.values())):
                sums[at + i] += value
        self._waited += fmean(step.rows[rank].step_seconds - own[rank] for rank in timed)
        self._length += fmean(step.rows[rank].step_seconds for rank in timed)
        self._spans[-1] = first, step.step, spanned
        self._open += 1
        self.steps += 1
        self.whole += not step.chosen
        self.ranks = max(self.ranks, *(rank + 1 for rank in own))
        for rank, cost in pace.costs(own).items():
            self._costs[rank] = self._costs.get(rank, 0.0) + cost
        if len(own) > 1:
            last = max(own, key=lambda rank: own[rank])
            self._lasts[last] = self._lasts.get(last, 0) + 1
        if len(self._spans) > SPANS:
            self._join()

    def _join(self) -> None:
        pairs = zip(self._spans[::2], self._spans[1::2], strict=False)
        odd = self._spans[-1:] if len(self._spans) % 2 else []
        self._spans = [(a[0], b[1], _added(a[2], b[2])) for a, b in pairs] + odd
        self._width *= 2

    @property
    def step_seconds(self) -> float:
        """The mean time of a step; NaN if unknown."""
        return self._length / self.steps if self.steps else math.nan

    @property
    def waiting(self) -> float:
        """The share of the step time that the ranks waited for others, or exchanged data with them."""
        return self._waited / self._length if self._length else math.nan

    @property
    def data(self) -> float:
        """The share of the step time that the median rank waited for its data loader; NaN if no loader was seen."""
        whole = _added(self._whole, self._lowest)
        ranks = [rank for rank in _known(whole) if _of(whole, rank, _FED) and _of(whole, rank, _STEP) > 0]
        found = [_of(whole, rank, _PHASES) / _of(whole, rank, _STEP) for rank in ranks]
        return median_low(found) if found else math.nan

    @property
    def _whole(self) -> array[float]:
        made = array("d")
        for _, _, sums in self._spans:
            made = _added(made, sums)
        return made

    def totals(self) -> list[RankPace]:
        """Return the totals of the ranks, those with the highest cost first."""
        cells = {cell.rank: cell for cell in _cells(self._whole)}
        unknown = Cell(rank=-1, own=math.nan, excess=math.nan, noise=math.nan, phase="")
        return sorted(
            (
                RankPace(
                    rank=rank,
                    cost=(cost := self._costs.get(rank, 0.0)),
                    share=cost / self._length if self._length else 0.0,
                    last=self._lasts.get(rank, 0) / self.steps,
                    own=cell.own,
                    excess=cell.excess,
                    phase=cell.phase,
                )
                for rank in cells.keys() | self._costs.keys()
                for cell in (cells.get(rank, unknown),)
            ),
            key=lambda found: (-found.cost, found.rank),
        )

    def rows(self) -> list[range]:
        """Return the ranks of each row of the heat map."""
        width = max(1, math.ceil(self.ranks / ROWS))
        return [range(first, min(first + width, self.ranks)) for first in range(0, self.ranks, width)]

    def spans(self) -> Iterator[tuple[int, int, dict[int, Cell]]]:
        """Yield first and last step of each span, and row -> the slowest rank of the row, in steps with all rows."""
        width = max(1, math.ceil(self.ranks / ROWS))
        for first, last, sums in self._spans:
            cells: dict[int, Cell] = {}
            for cell in _cells(sums):
                known = cells.get(cell.rank // width)
                if known is None or cell.excess > known.excess:
                    cells[cell.rank // width] = cell
            yield first, last, cells


def _cells(sums: Sequence[float]) -> list[Cell]:
    """Return what each rank's own time was, beside the median rank's."""
    ranks = _known(sums)
    if not ranks:
        return []
    means = {rank: [_of(sums, rank, i) / _of(sums, rank, _COUNT) for i in range(_SUMS)] for rank in ranks}
    middle = [median_low(values) for values in zip(*means.values(), strict=True)]
    noise = 0.0
    if len(ranks) >= _ENOUGH and middle[_STEP] > 0:
        noise = _UNLIKE * spread([mean[_OWN] for mean in means.values()], middle[_OWN]) / middle[_STEP]
    made = []
    for rank, mean in means.items():
        gaps = {phase: mean[_PHASES + i] - middle[_PHASES + i] for i, phase in enumerate(pace.PHASES)}
        excess = (mean[_OWN] - middle[_OWN]) / middle[_STEP] if middle[_STEP] > 0 else 0.0
        phase = max(gaps, key=lambda phase: gaps[phase])
        made.append(Cell(rank=rank, own=mean[_OWN], excess=excess, noise=noise, phase=phase))
    return made


def _known(sums: Sequence[float]) -> list[int]:
    return [rank for rank in range(len(sums) // _SUMS) if _of(sums, rank, _COUNT)]


def _of(sums: Sequence[float], rank: int, what: int) -> float:
    return sums[rank * _SUMS + what]


def _added(one: array[float], two: array[float]) -> array[float]:
    longer, shorter = (one, two) if len(one) >= len(two) else (two, one)
    made = array("d", longer)
    for i, value in enumerate(shorter):
        made[i] += value
    return made
