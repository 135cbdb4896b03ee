"""RANK108: one rank's loss is unlike the others' for a long time."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.row import Flag

#: The window is judged every so many steps.
_EVERY = 10
_LOOSE = Flag.LOCAL_ONLY | Flag.IN_JOIN
_MAD = 1.4826  # a normal distribution's standard deviation / median absolute deviation


@dataclass(frozen=True, slots=True)
class _Outlier:
    rank: int
    z: float
    excess: float


class LossOutlier(StreakRule):
    """One rank's loss lies far from its peers' over a long window, well beyond the noise and the peers' own spread.

    Impact: often none: shards differ. But broken labels, another tokenizer or unnormalised inputs on one rank look
    just like this, and pull the average gradient in a wrong direction.

    Diagnosis: `z` is the median distance to the peers' median loss, in units of its noise. Look at twenty samples of
    this rank with their labels, and compare the class frequencies and the input's mean and standard deviation with
    another rank's.

    Causes:
    - labels that do not belong to the inputs on this rank (shifted file, other class order, stale cache)
    - other preprocessing: normalisation left out, other vocabulary, other crop
    - a shard that really is harder or easier, which is no mistake
    - this rank computes the loss differently (weights, label smoothing, reduction)

    Remedy:
    - shuffle before sharding, so that shards are alike
    - hash the label file and the preprocessing configuration on each rank and compare
    - if the shard is meant to differ, leave it: nothing is wrong with the synchronisation
    """

    code = "RANK108"
    severity = Severity.WARNING
    title = "one rank's loss is an outlier"
    incident = ("ranks",)
    outlier_in_a_row = enough = Threshold(
        3, "judgements in a row that a rank must look odd in", source="with one every ten steps, thirty further steps"
    )
    outlier_least = Threshold(
        20, "steps that must be there", source="the median of twenty is known to 0.28 standard deviations"
    )
    outlier_ranks = Threshold(
        3, "ranks, below which nobody can be outvoted", source="of two, either may be the odd one"
    )
    outlier_same_side = Threshold(
        0.95,
        "share of the window's steps in which the rank lies on the same side of its peers",
        source="chosen: 48 of 50 coins on one side come once in 1e12",
    )
    outlier_share = Threshold(
        0.25,
        "distance from the peers as a share of their loss",
        source="chosen: shards of different difficulty differ by less",
    )
    outlier_window = Threshold(50, "steps that are looked at together", source="chosen: five judgements")
    outlier_z = Threshold(
        6,
        "distance from the peers as a multiple of the noise and of the spread between them",
        source="wider than 3.5 deviations (Iglewicz, Hoaglin 1993): shards differ as well",
    )
    fires_on = Examples(
        lambda: steps(60, odd={3: {"loss": 2.3}}),
        lambda: steps(60, world=3, odd={0: {"loss": 0.02}}),
    )
    silent_on = Examples(
        lambda: steps(80),
        lambda: steps(40, world=2, odd={1: {"loss": 9.0}}),
        lambda: steps(39, odd={3: {"loss": 2.3}}),
        lambda: tuple(step_at(n, odd={1: {"loss": 5.0}} if n % 7 == 0 else {}) for n in range(80)),
        lambda: steps(80, odd={0: {"loss": 1.0}, 1: {"loss": 1.3}, 2: {"loss": 1.6}, 3: {"loss": 2.0}}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._windows: dict[int, deque[tuple[int, dict[int, float]]]] = {}
        self._counts: dict[int, int] = {}
        self._outliers: dict[int, _Outlier] = {}  # of the window that was judged last

    def can_show(self, step: Step) -> bool:
        return self._counts.get(step.optimizer, 0) % _EVERY == 0

    def shown(self, step: Step) -> Mapping[int, bool] | None:
        losses = {rank: row.loss for rank, row in step.rows.items() if math.isfinite(row.loss)}
        if len(losses) < max(self.outlier_ranks, step.world) or step.any(_LOOSE):
            return None
        window = self._windows.setdefault(step.optimizer, deque(maxlen=int(self.outlier_window)))
        window.append((step.step, losses))
        self._counts[step.optimizer] = self._counts.get(step.optimizer, 0) + 1
        if self._counts[step.optimizer] % _EVERY or len(window) < self.outlier_least:
            return None
        self._outliers = {outlier.rank: outlier for outlier in self._apart([losses for _, losses in window])}
        return {rank: rank in self._outliers for rank in losses}

    def report(self, step: Step, streaks: Mapping[int, Streak]) -> Findings:
        window = self._windows[step.optimizer]
        medians = {str(r): statistics.median(losses[r] for _, losses in window) for r in window[-1][1]}
        for rank in streaks:
            z, excess = self._outliers[rank].z, self._outliers[rank].excess
            yield self.finding(
                step,
                step=window[0][0],
                ranks=(rank,),
                subject=("loss",),
                evidence={"z": z, "excess": excess, "window": len(window), "median_loss": medians},
            )

    def _apart(self, window: Sequence[Mapping[int, float]]) -> Iterator[_Outlier]:
        ranks = sorted(window[-1])
        apart: dict[int, list[float]] = {rank: [] for rank in ranks}
        levels = []
        for losses in window:
            values = sorted(losses.values())
            levels.append(statistics.median(values))
            for rank in ranks:
                apart[rank].append(losses[rank] - _median_without(values, losses[rank]))
        middle = {rank: statistics.median(values) for rank, values in apart.items()}
        noise = statistics.median(_mad(values) for values in apart.values())
        level = abs(statistics.median(levels))
        for rank in ranks:
            spread = _mad([middle[other] for other in ranks if other != rank])
            scale = max(noise, spread, 1e-3 * level, 1e-12)
            z = middle[rank] / scale
            peers = abs(statistics.median(statistics.median(w[o] for w in window) for o in ranks if o != rank))
            side = sum(value * middle[rank] > 0 for value in apart[rank])
            far = abs(z) >= self.outlier_z and abs(middle[rank]) >= self.outlier_share * peers
            if far and side >= self.outlier_same_side * len(window):
                yield _Outlier(rank, z, middle[rank])


def _median_without(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them."""
    rest = list(values)
    rest.remove(value)
    return statistics.median(rest)


def _mad(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _MAD * statistics.median(abs(value - middle) for value in values)
