"""What the rules about growing memory share: a trend that noise does not imitate, and how it is told. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from ddpdebug.detectors.kinds import Detector, Fields, Finding, Findings, Step, Threshold
from ddpdebug.detectors.mem.sizes import MIB, size_text
from ddpdebug.schema.details import Holder, Holders
from ddpdebug.schema.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Steady growth of one rank."""

    per_step: float
    grown: int
    since: int  # the step at which the judged blocks begin


@dataclass(slots=True)
class _Scale:
    """The minima of so many blocks of steps in a row.

    The minimum of a block knows nothing of evaluations, of long batches and of what the allocator caches in between.
    """

    size: int
    least: float
    rule: TrendRule  # for its thresholds
    minima: deque[tuple[int, int]]  # (first step, bytes)
    lowest: int | None = None
    first: int = 0
    filled: int = 0

    def add(self, step: int, value: int, *, by_steps: bool) -> bool:
        """Add a value in bytes; return whether that completes a block.

        Args:
            by_steps: so many steps are enough, however few of them were watched.
        """
        if self.lowest is None:
            self.lowest, self.first, self.filled = value, step, 0
        self.lowest = min(self.lowest, value)
        self.filled += 1
        if self.filled < self.size and not (by_steps and step - self.first >= self.size):
            return False
        self.minima.append((self.first, self.lowest))
        self.lowest = None
        return True

    def trend(self, blocks: int) -> Trend | None:
        """Return the trend of the last blocks, if there are so many and they show one."""
        if len(self.minima) < blocks:
            return None
        minima = list(self.minima)[-blocks:]
        values = [value for _, value in minima]
        rises = [after - before for before, after in pairwise(values)]
        grown = values[-1] - values[0]
        mean = grown / len(rises)  # not the median: it forgets a warm-up that brought most of the growth
        enough = grown >= max(self.least, self.rule.memory_growth_share * values[-1])
        if not enough or min(rises) < self.rule.memory_steady * mean:
            return None
        return Trend(per_step=grown / (minima[-1][0] - minima[0][0]), grown=grown, since=minima[0][0])

    def stopped(self, trend: Trend) -> bool:
        """Whether the last two blocks no longer follow a trend."""
        newest = list(self.minima)[-3:]
        rises = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(newest)]
        return len(rises) == 2 and max(rises) < self.rule.memory_stopped * trend.per_step


class Growth:
    """One rank's memory over the steps; growth below `least` MiB is none."""

    def __init__(self, least: float, rule: TrendRule) -> None:
        self._seen = 0
        self._warm_up = rule.memory_warm_up
        self._blocks = int(rule.memory_blocks)
        sizes = rule.memory_block_short, rule.memory_block_medium, rule.memory_block_long
        self._scales = [_Scale(int(size), MIB * least, rule, deque(maxlen=self._blocks)) for size in sizes]
        self._found: tuple[Trend, _Scale] | None = None
        self._base: int | None = None

    @property
    def trend(self) -> Trend | None:
        """The trend that goes on, if there is one."""
        return None if self._found is None else self._found[0]

    def suspicion(self, blocks: int) -> Trend | None:
        """The trend, or what looks like one over so many blocks: reason to ask who holds, not to say that it grows."""
        return self.trend or self._scales[0].trend(blocks)

    def add(self, step: int, value: int, declared: int = 0) -> None:
        """Add a step's bytes, of which `declared` may be growth that the user wants."""
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        base = self._base = value if self._base is None else min(self._base, value)
        value -= min(declared, value - base)
        for scale in self._scales:
            goes_on = self._found is not None and self._found[1] is scale
            if not scale.add(step, value, by_steps=goes_on):
                continue
            if self._found is None and (trend := scale.trend(self._blocks)) is not None:
                self._found = trend, scale
            elif self._found is not None and goes_on and scale.stopped(self._found[0]):
                self._found = None
                scale.minima.clear()


def declared_bytes(step: Step, rank: int) -> int:
    """Return the growth that the user has declared on a rank; a declaration without a number has no end."""
    told = step.facts.get("growth", {}).get(rank)
    return sum(1 << 62 if growth.bytes is None else growth.bytes for growth in (() if told is None else told.declared))


def used(row: Row) -> int:
    """Return what a rank uses at the end of a step: of its device, or privately where there is none."""
    return row.device_allocated_bytes or row.host_private_bytes


def best_holder(step: Step, *, graphs: bool) -> tuple[int, Holder] | None:
    """Return (rank, holder) of the ranks' answers; with `graphs` the one that keeps most graphs, otherwise bytes."""
    found = [(rank, holder) for rank, answer in sorted(step.answers(Holders).items()) for holder in answer.holders]
    if not found:
        return None
    return max(found, key=lambda pair: (pair[1].graphs if graphs else pair[1].bytes, -pair[0]))


def holder_text(holder: Holder) -> str:
    """Return who holds, in words: `losses` (list, 412 entries) in `train()`."""
    size = f", {holder.entries} entries" if holder.entries is not None else ""
    function = f" in `{holder.function}()`" if holder.function else ""
    return f"`{holder.name}` ({holder.kind}{size}){function}"


@dataclass(frozen=True, slots=True)
class Series:
    """One kind of memory that a rule follows."""

    name: str  # the subject where no holder is known
    field: str
    limit: str
    searched: bool = True  # somebody in the process itself can be asked who holds it


class TrendRule(Detector):
    """A rule that follows memory over blocks of steps."""

    memory_block_long = Threshold(512, "steps of a long block, for slow leaks", source="eight medium ones")
    memory_block_medium = Threshold(64, "steps of a medium block", source="eight short ones")
    memory_block_short = Threshold(
        8,
        "steps of a short block, for memory that fills within minutes",
        source="the minimum of eight steps knows nothing of a single long batch",
    )
    memory_blocks = Threshold(
        6,
        "blocks in a row whose minima must all rise",
        source="growth that ends, or comes in jumps at epochs, is not steady",
    )
    memory_growth_share = Threshold(
        0.005,
        "least growth over the blocks as a share of what is used",
        source="chosen: less does no harm within a day",
    )
    memory_patience = Threshold(
        24,
        "steps that a rule waits for the holder's name",
        source="chosen: the search runs beside training and may take longer than a step",
    )
    memory_steady = Threshold(
        0.3,
        "share of the mean block's growth that every block must bring",
        source="noise of the allocator comes in some blocks and not in others",
    )
    memory_stopped = Threshold(
        0.1,
        "share of the trend that two blocks must fall below to end it",
        source="a third of `memory_steady`: hysteresis",
    )
    memory_warm_up = Threshold(
        8, "first steps that are not judged", source="optimizer state, workspaces and buckets appear, caches fill"
    )


class GrowthRule(TrendRule):
    """A rule about memory that rises from step to step."""

    series: ClassVar[tuple[Series, ...]]
    least: ClassVar[Threshold]  # growth in MiB, below which it is none
    memory_held = Threshold(
        0.25,
        "share of the growth that a holder must hold to explain it",
        source="chosen: tensors may be the smaller part of what an object keeps",
    )
    memory_threat = Threshold(
        20,
        "times as long as growth has lasted, within which the limit would be reached; else the run's end reports it",
        source="chosen: what has grown for one step in twenty of the way; a cache that fills stops long before",
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._growth: dict[tuple[str, int], Growth] = {}
        self._since: dict[str, int] = {}  # series -> the step that first showed a trend
        self._told: set[str] = set()
        self._held: dict[str, Holder] = {}  # series -> who was found to hold what grows
        self._last: Step | None = None

    def can_show(self, step: Step) -> bool:
        return step.optimizer == 0 and not self._since

    def suspects(self, step: Step) -> bool:
        searched = {series.name for series in self.series if series.searched}
        return step.optimizer == 0 and bool(searched & self._since.keys() - self._told - self._held.keys())

    def detect(self, step: Step) -> Findings:
        for series in self.series if step.optimizer == 0 else ():
            yield from self._told_of(series, step)

    def _told_of(self, series: Series, step: Step) -> Findings:
        """The finding about ranks that grow, once that threatens and who holds it is known, or has been waited for.

        What fills a cache looks like a leak until it ends: where the limit is far, only the end of the run can say.
        """
        self._last = step
        if step.chosen:  # one that grows for long uses most in the end, and is there from then on
            self._growth = {k: growth for k, growth in self._growth.items() if k[0] != series.name or k[1] in step.rows}
        for rank, row in step.rows.items():
            if (growth := self._growth.get((series.name, rank))) is None:
                growth = self._growth[series.name, rank] = Growth(self.least, self)
            growth.add(step.step, getattr(row, series.field), declared_bytes(step, rank))
        if not (ranks := self._ranks(series, step)):
            self._since.pop(series.name, None)
            self._held.pop(series.name, None)
            self._told.discard(series.name)
            return
        first = self._since.setdefault(series.name, step.step)
        if series.searched and (held := best_holder(step, graphs=False)) is not None:
            self._held[series.name] = held[1]
        answered = not series.searched or series.name in self._held or bool(step.answers(Holders))
        waited = answered or step.step - first >= self.memory_patience
        if series.name in self._told or (waited and self._threatens(series, step, ranks)):
            self._told.add(series.name)
            yield self._report(series, step, ranks)

    def _threatens(self, series: Series, step: Step, ranks: Sequence[int]) -> bool:
        """Whether some rank comes to its limit, where one is known, before long."""
        for rank in ranks:
            trend, row = self._trend(series, rank), step.rows[rank]
            limit, far = getattr(row, series.limit), self.memory_threat * (step.step - trend.since) * trend.per_step
            if not limit or limit - getattr(row, series.field) <= far:
                return True
        return False

    def finish(self) -> Findings:
        for series in self.series:
            if series.name in self._since and series.name not in self._told and self._last is not None:
                yield self._report(series, self._last, self._ranks(series, self._last))

    def _ranks(self, series: Series, step: Step) -> tuple[int, ...]:
        return tuple(r for r in step.rows if (g := self._growth.get((series.name, r))) is not None and g.trend)

    def _report(self, series: Series, step: Step, ranks: Sequence[int]) -> Finding:
        worst = max(ranks, key=lambda r: self._trend(series, r).per_step)
        trend = self._trend(series, worst)
        value, limit = getattr(step.rows[worst], series.field), getattr(step.rows[worst], series.limit)
        evidence: dict[str, Any] = {
            "per_step": size_text(trend.per_step),
            "bytes_per_step": round(trend.per_step),
            "grown": f"{size_text(trend.grown)} since step {trend.since}",
            "now": size_text(value),
        }
        if limit:
            left = max(0, limit - value) / trend.per_step
            evidence |= {"limit": size_text(limit), "exhausted_at_step": step.step + round(left)}
        held = self._held.get(series.name)
        if held is not None and held.bytes >= self.memory_held * trend.grown:
            evidence["holder"] = f"{holder_text(held)} holds {size_text(held.bytes)} in tensors"
        else:
            held = None
        return self.finding(
            step,
            step=trend.since,
            ranks=tuple(ranks),
            subject=(held.name if held is not None else self.subject(series, step),),
            phase=series.name,
            location=held.location if held is not None else self.place_of(series, step),
            evidence=evidence,
        )

    def subject(self, series: Series, step: Step) -> str:
        """Return what grows, where no holder is known."""
        return series.name

    def place_of(self, series: Series, step: Step) -> str | None:
        """Return the line to look at, where no holder is known."""
        return None

    def _trend(self, series: Series, rank: int) -> Trend:
        trend = self._growth[series.name, rank].trend
        assert trend is not None
        return trend
