"""RANK108: one rank's loss is unlike the others' for a long time."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdebug.detectors.base import Detector, Examples
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

#: The window is judged every so many steps.
_EVERY = 10
_LOOSE = Flag.LOCAL_ONLY | Flag.IN_JOIN
_MAD = 1.4826  # a normal distribution's standard deviation / median absolute deviation


@dataclass(frozen=True, slots=True)
class _Outlier:
    rank: int
    z: float
    excess: float


class LossOutlier(Detector):
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
    follows = (
        *("RANK101", "RANK102", "RANK103", "RANK104", "RANK105", "RANK106", "RANK107", "RANK109", "RANK112"),
        *("SYNC201", "SYNC202", "SYNC203", "SYNC205", "SYNC206", "SYNC208", "SYNC211", "DATA910"),
    )
    stage = 80
    fires_on = Examples(
        lambda: (
            steps(60, odd={3: {"loss": 2.3}}),
            steps(60, world=3, odd={0: {"loss": 0.02}}),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(80),
            steps(40, world=2, odd={1: {"loss": 9.0}}),
            steps(39, odd={3: {"loss": 2.3}}),
            tuple(step_at(n, odd={1: {"loss": 5.0}} if n % 7 == 0 else {}) for n in range(80)),
            steps(80, odd={0: {"loss": 1.0}, 1: {"loss": 1.3}, 2: {"loss": 1.6}, 3: {"loss": 2.0}}),
        )
    )

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._windows: dict[int, deque[tuple[int, dict[int, float]]]] = {}
        self._counts: dict[int, int] = {}
        self._odd: dict[tuple[int, int], int] = {}

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        return (finding.ranks,)

    def sees(self, step: Step) -> bool:
        return self._counts.get(step.optimizer, 0) % _EVERY == 0

    def detect(self, step: Step) -> Iterator[Finding]:
        losses = {rank: row.loss for rank, row in step.rows.items() if math.isfinite(row.loss)}
        if len(losses) < max(self.limit("outlier_ranks"), step.world) or step.any(_LOOSE):
            return
        window = self._windows.setdefault(step.optimizer, deque(maxlen=int(self.limit("outlier_window"))))
        window.append((step.step, losses))
        self._counts[step.optimizer] = self._counts.get(step.optimizer, 0) + 1
        if self._counts[step.optimizer] % _EVERY or len(window) < self.limit("outlier_least"):
            return
        outliers = {outlier.rank: outlier for outlier in _outliers([losses for _, losses in window], self.limit)}
        for rank in losses:
            key = (step.optimizer, rank)
            self._odd[key] = self._odd.get(key, 0) + 1 if rank in outliers else 0
            if self._odd[key] >= self.limit("outlier_in_a_row"):
                yield self._report(step, outliers[rank], window)

    def _report(self, step: Step, outlier: _Outlier, window: Sequence[tuple[int, dict[int, float]]]) -> Finding:
        medians = {str(r): statistics.median(losses[r] for _, losses in window) for r in window[-1][1]}
        return self.finding(
            step=window[0][0],
            last_step=step.step,
            ranks=(outlier.rank,),
            subject=("loss",),
            evidence={"z": outlier.z, "excess": outlier.excess, "window": len(window), "median_loss": medians},
        )


def _outliers(window: Sequence[Mapping[int, float]], limit: Callable[[str], float]) -> Iterator[_Outlier]:
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
        far = abs(z) >= limit("outlier_z") and abs(middle[rank]) >= limit("outlier_share") * peers
        if far and side >= limit("outlier_same_side") * len(window):
            yield _Outlier(rank, z, middle[rank])


def _median_without(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them."""
    rest = list(values)
    rest.remove(value)
    return statistics.median(rest)


def _mad(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _MAD * statistics.median(abs(value - middle) for value in values)
