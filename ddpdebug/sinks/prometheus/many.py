"""Many ranks behind one endpoint: aggregates over all ranks, and series of selected ones. Torch-free.

A thousand ranks have 65,000 series, and what a person looks for in them is the rank that is unlike the others. So in a
larger world rank 0 exports aggregates, the rank that holds each extreme, and the series of a few ranks: its own, those
that are ill, those that are slow or full. Who is shown stays for a while: series do not come and go with the noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from ddpdebug.sinks.prometheus.metrics import PHASES, WAITS, EachRank, RankState

#: Up to so many ranks each one is exported.
EVERY_RANK = 64
#: So many ranks are shown in a larger world besides rank 0.
SHOWN = 16
#: Seconds for which a rank that is shown stays.
_STAYS = 600.0
#: Means of times and fresh counts look back for so many seconds at least, and twice as many at most.
_WINDOW = 60.0
#: Where it is a matter of degree, so many candidates; one takes the place of another where it is so much worse.
_CANDIDATES, _WORSE = 4, 1.2

#: Begins the names of aggregates, in the place of `ddpdebug_`.
PREFIX = "ddpdebug_all_ranks_"
_CUTS = {"min": 0.0, "p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
STATISTICS = (*_CUTS, "mean", "sum")
EXTREMES = "ddpdebug_extreme_rank"


class _Past:
    """What a rank had counted when the window began."""

    def __init__(self, state: RankState | None = None) -> None:
        self.steps = 0 if state is None else state.step_count
        self.step_seconds = 0.0 if state is None else state.step_seconds
        self.phase_seconds = [0.0] * len(PHASES) if state is None else state.phase_seconds.copy()
        self.phase_counts = [0] * len(PHASES) if state is None else state.phase_counts.copy()
        self.own_seconds = [0.0] * len(PHASES) if state is None else state.own_seconds.copy()
        self.wait_seconds = [0.0] * len(WAITS) if state is None else state.wait_seconds.copy()
        self.cost_seconds = 0.0 if state is None else state.cost_seconds
        self.nonfinite = {} if state is None else state.nonfinite.copy()


class Recent:
    """Recent means of the ranks' times, and the ranks with recent non-finite numbers."""

    def __init__(self) -> None:
        self._pasts: deque[tuple[float, dict[int, _Past]]] = deque([(-math.inf, {})], maxlen=2)
        self.steps: dict[int, float] = {}
        self.phases: dict[int, dict[str, float]] = {}
        self.own: dict[int, float] = {}
        self.waits: dict[int, dict[str, float]] = {}
        self.costs: dict[int, float] = {}
        self.nonfinite: dict[str, set[int]] = {}

    def look(self, ranks: Mapping[int, RankState], now: float) -> None:
        """Take the counts at a time in seconds; called for each rendering."""
        if now - self._pasts[-1][0] >= _WINDOW:
            self._pasts.append((now, {rank: _Past(state) for rank, state in ranks.items()}))
        then, nothing = self._pasts[0][1], _Past()
        self.steps, self.phases, self.nonfinite = {}, {}, {}
        self.own, self.waits, self.costs = {}, {}, {}
        # what a rank costs is known of every step, its times of those of which its row is not here for being slow
        longest = max((state.step_count - then.get(rank, nothing).steps for rank, state in ranks.items()), default=0)
        for rank, state in ranks.items():
            past = then.get(rank, nothing)
            if longest > 0:
                self.costs[rank] = (state.cost_seconds - past.cost_seconds) / longest
            if (count := state.step_count - past.steps) > 0:
                self.steps[rank] = (state.step_seconds - past.step_seconds) / count
                self.own[rank] = (sum(state.own_seconds) - sum(past.own_seconds)) / count
                self.waits[rank] = {
                    kind: (state.wait_seconds[i] - past.wait_seconds[i]) / count for i, kind in enumerate(WAITS)
                }
            self.phases[rank] = {
                phase: (state.phase_seconds[i] - past.phase_seconds[i]) / count
                for i, phase in enumerate(PHASES)
                if (count := state.phase_counts[i] - past.phase_counts[i]) > 0
            }
            for what, count in state.nonfinite.items():
                if count > past.nonfinite.get(what, 0):
                    self.nonfinite.setdefault(what, set()).add(rank)


class Shown:
    """The ranks with series of their own: those with problems, then those with extreme values, `SHOWN` in all."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}  # rank -> when there was last a reason to show it
        self._since: dict[int, float] = {}
        self._ill: dict[int, float] = {}  # those of them that were ill, and when last

    def choose(
        self, now: float, world: int, ill: Iterable[Collection[int]], degrees: Iterable[Mapping[int, float]]
    ) -> frozenset[int]:
        """Return the ranks with series of their own.

        Args:
            ill: ranks by what they have, the worst first; what more than half of all have tells nobody apart.
            degrees: rank -> how slow, how full; the largest are shown where there is room.
        """
        sick = list(dict.fromkeys(rank for ranks in ill if len(ranks) <= world / 2 for rank in sorted(ranks) if rank))
        for rank in sick:
            if rank in self._seen:
                self._ill[rank] = self._seen[rank] = now
        for rank in [rank for rank, seen in self._seen.items() if now - seen >= _STAYS]:
            self._leave(rank)
        for rank in [rank for rank, seen in self._ill.items() if now - seen >= _STAYS]:
            del self._ill[rank]
        for rank in sick:
            if rank not in self._seen and (len(self._seen) < SHOWN or self._make_room()):
                self._enter(rank, now)
                self._ill[rank] = now
        for values in degrees:
            self._first(values, now)
        return frozenset(self._seen)

    def _first(self, values: Mapping[int, float], now: float) -> None:
        """Show those with the largest values; of the others that are shown the first ones stay, if they are near."""
        known = {rank: value for rank, value in values.items() if rank and value > 0}
        best = sorted(known, key=lambda rank: (-known[rank], rank))[:_CANDIDATES]
        if not best:
            return
        near = known[best[-1]] / _WORSE
        mine = sorted((r for r in self._seen if known.get(r, 0) >= near), key=lambda rank: (-known[rank], rank))
        for rank in mine[:_CANDIDATES]:
            self._seen[rank] = now
        wanted = [rank for rank in best if rank not in self._seen][: max(0, _CANDIDATES - len(mine))]
        far = [rank for rank in best if rank not in self._seen and mine and known[rank] > _WORSE * known[mine[0]]]
        for rank in dict.fromkeys([*wanted, *far]):
            if len(self._seen) < SHOWN or self._make_room(before=now - _STAYS):
                self._enter(rank, now)

    def _make_room(self, before: float = math.inf) -> bool:
        """Take one off that is not ill and was shown since before a time: the one without a reason for longest."""
        others = [rank for rank in self._seen if rank not in self._ill and self._since[rank] <= before]
        if others:
            self._leave(min(others, key=lambda rank: (self._seen[rank], -rank)))
        return bool(others)

    def _enter(self, rank: int, now: float) -> None:
        self._seen[rank] = self._since[rank] = now

    def _leave(self, rank: int) -> None:
        del self._seen[rank], self._since[rank]
        self._ill.pop(rank, None)


class ManyRanks(EachRank):
    """Makes two families from each family of single ranks: one of the selected ranks, one of aggregates over all.

    Args:
        shown: ranks whose own series are exported.
        recent: has looked at the ranks.
    """

    def __init__(self, shown: Iterable[int], recent: Recent) -> None:
        self._shown, self._recent = frozenset(map(str, shown)), recent
        text = "Rank that holds the smallest or the largest value of a metric, the first of equals."
        self._extremes = GaugeMetricFamily(EXTREMES, text, labels=("metric", "of", "stat"))

    def shows(self, rank: str) -> bool:
        """Whether the series of a rank are exported."""
        return rank in self._shown

    def gauge(
        self, name: str, text: str, samples: Iterable[tuple[Sequence[str], float]], *labels: str, whole: bool = False
    ) -> Iterator[Metric]:
        """Yield a gauge of the selected ranks, or of all, and its aggregates."""
        return self._both(super().gauge, name, text, list(samples), labels, whole=whole)

    def counter(
        self, name: str, text: str, samples: Iterable[tuple[Sequence[str], float]], *labels: str
    ) -> Iterator[Metric]:
        """Yield a counter of the selected ranks, and its aggregates."""
        return self._both(super().counter, name, text, list(samples), labels)

    def more(self, ranks: Sequence[tuple[str, RankState]]) -> Iterator[Metric]:
        """Yield the times over all ranks, and the ranks that hold the extremes of the families before."""
        # their bounds are the same, and are known from the same step on
        known = [s for _, s in ranks if len(s.buckets) == len(s.bounds) + 1] or [s for _, s in ranks]
        text = (
            "Over all ranks: Time from step to step, without the first one; the buckets lie about the run's usual step."
        )
        steps = HistogramMetricFamily(f"{PREFIX}step_seconds", text, labels=())
        bounds, seconds = (*map(str, known[0].bounds), "+Inf"), math.fsum(state.step_seconds for state in known)
        if known[0].buckets:
            counts = accumulate(map(sum, zip(*(state.buckets for state in known), strict=True)))
            steps.add_metric((), list(zip(bounds, counts, strict=True)), seconds)
        else:
            steps.add_sample(f"{steps.name}_count", {}, sum(state.step_count for state in known))
            steps.add_sample(f"{steps.name}_sum", {}, seconds)
        yield steps
        text = "Mean time of a step in the last minute or two."
        yield self._over("mean_step_seconds", text, _by_rank(self._recent.steps))
        text = "Mean time of a phase of the steps of the last minute or two."
        yield self._over("mean_phase_seconds", text, _by_label(self._recent.phases), ("phase",))
        text = "Mean time of a step in the last minute or two that was the rank's own: others wait for the largest."
        yield self._over("mean_own_seconds", text, _by_rank(self._recent.own))
        text = "Mean time of a step in the last minute or two in which the rank waited for others."
        yield self._over("mean_wait_seconds", text, _by_label(self._recent.waits), ("kind",))
        text = "Mean time by which the rank made a step longer in the last minute or two; the sum is that of all ranks."
        yield self._over("mean_straggler_cost_seconds", text, _by_rank(self._recent.costs))
        yield self._extremes

    def _both(
        self,
        make: Callable[..., Iterator[Metric]],
        name: str,
        text: str,
        samples: list[tuple[Sequence[str], float]],
        labels: tuple[str, ...],
        *,
        whole: bool = False,
    ) -> Iterator[Metric]:
        yield from make(name, text, [one for one in samples if whole or one[0][0] in self._shown], *labels)
        yield self._over(name.removeprefix("ddpdebug_"), text, samples, labels)

    def _over(
        self, name: str, text: str, samples: Iterable[tuple[Sequence[str], float]], labels: tuple[str, ...] = ()
    ) -> Metric:
        """Return the aggregates of one metric, and keep who holds its extremes; NaN does not count."""
        made = GaugeMetricFamily(PREFIX + name, f"Over all ranks: {text}", labels=(*labels, "stat"))
        groups: dict[tuple[str, ...], tuple[list[float], list[str]]] = {}
        for known, value in samples:
            values, ranks = groups.setdefault(tuple(known[1:]), ([], []))
            if value == value:  # noqa: PLR0124 - NaN
                values.append(value)
                ranks.append(known[0])
        for others, (values, ranks) in groups.items():
            if not values:
                continue
            ordered = sorted(values)
            total = sum(ordered)
            cuts = [ordered[round(share * (len(ordered) - 1))] for share in _CUTS.values()]
            for stat, value in zip(STATISTICS, (*cuts, total / len(ordered), total), strict=True):
                made.add_metric((*others, stat), value)
            for stat, value in (("min", ordered[0]), ("max", ordered[-1])):
                self._extremes.add_metric((name, " ".join(others), stat), float(ranks[values.index(value)]))
        return made


def _by_rank(values: Mapping[int, float]) -> list[tuple[Sequence[str], float]]:
    return [((str(rank),), value) for rank, value in values.items()]


def _by_label(values: Mapping[int, Mapping[str, float]]) -> list[tuple[Sequence[str], float]]:
    return [((str(rank), label), value) for rank, found in values.items() for label, value in found.items()]
