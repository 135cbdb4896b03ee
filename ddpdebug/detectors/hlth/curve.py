"""The shape of a loss curve, and the series it is read from: robust numbers that noise and schedules do not move."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from ddpdebug.detectors.base import Detector
from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.hlth.samples import BROKEN
from ddpdebug.detectors.hlth.validation import ValidationSource
from ddpdebug.detectors.thresholds import threshold
from ddpdebug.findings import Finding
from ddpdebug.observations import Flag
from ddpdebug.steps import Step

#: Losses that are kept; the best level is remembered for longer.
KEPT = 512
_NOT_TAKEN = Flag.SKIPPED | Flag.GUARD_SKIPPED
_MAD = 1.4826  # a normal distribution's standard deviation / median absolute deviation
_BLOCK = 4
#: A learning rate that rises by this factor begins something new (warm restart, warm-up, cycle).
_RESTART = 1.5


@dataclass(slots=True)
class Series:
    """The losses of one optimizer's steps, each the mean over the ranks."""

    steps: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0
    first: float = math.nan  # level of the first steps
    best: float = math.inf  # lowest level of a block so far, without the newest
    best_spread: float = 0.0
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=3 * _BLOCK))
    low: float = math.inf  # lowest learning rate since it has risen
    risen: int = 0  # the count at which it did

    def add(self, step: int, loss: float, rate: float) -> None:
        """Take in a step."""
        self.steps.append(step)
        self.losses.append(loss)
        self.newest.append(loss)
        self.count += 1
        if math.isfinite(rate):
            if rate > _RESTART * self.low:
                self.low, self.risen = rate, self.count
            self.low = min(self.low, rate)
        if self.count <= _BLOCK:
            self.first = statistics.median(self.losses)
        if len(self.newest) == 3 * _BLOCK:
            recent = list(self.newest)
            if (level := statistics.median(recent[:_BLOCK])) < self.best:
                around = recent[: 2 * _BLOCK]
                self.best, self.best_spread = level, max(around) - min(around)

    def restarted(self, window: int) -> bool:
        """Tell whether the learning rate has risen within the last steps."""
        return bool(self.risen) and self.count - self.risen < window

    def last(self, count: int) -> list[float]:
        """Return the newest losses, the oldest of them first."""
        return list(islice(reversed(self.losses), count))[::-1]


def loss_of(step: Step) -> float | None:
    """Return the mean over the ranks; None where some rank has no finite loss."""
    if "mean loss" not in step.memo:
        losses = step.columns["loss"]
        known = losses and all(map(math.isfinite, losses)) and not step.any(_NOT_TAKEN)
        step.memo["mean loss"] = math.fsum(losses) / len(losses) if known else None
    loss: float | None = step.memo["mean loss"]
    return loss


class LossRule(Detector):
    """A rule that reads the losses of each optimizer."""

    follows = BROKEN
    stage = 95

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.series: dict[int, Series] = {}
        self.told: set[tuple[int, str]] = set()

    def limit(self, name: str) -> float:
        """Return a threshold."""
        return threshold(self.config, name)

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        return (finding.phase,)

    def sees(self, step: Step) -> bool:
        return False  # said once

    def detect(self, step: Step) -> Iterator[Finding]:
        loss = loss_of(step)
        if loss is None:
            return
        series = self.series.setdefault(step.optimizer, Series())
        rate = next(iter(step.rows.values())).lr
        series.add(step.step, loss, rate)
        yield from self.judge(step, series)

    def judge(self, step: Step, series: Series) -> Iterator[Finding]:
        """Judge a series to which a step was added."""
        yield from ()

    def once(self, step: Step, phase: str) -> bool:
        """Tell whether this was not said before of this optimizer."""
        key = (step.optimizer, phase)
        new = key not in self.told
        self.told.add(key)
        return new


class ValidationRule(LossRule):
    """A rule that reads the validation losses, told or seen, each with the training loss since the one before."""

    topics = ("alone",)

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.source = ValidationSource()
        self._history: dict[int, list[tuple[int, float, float]]] = {}  # (step, validation, training loss)

    def judge(self, step: Step, series: Series) -> Iterator[Finding]:
        values = self.source.values(step)
        if not values:
            return
        if self.source.renewed():
            self._history.clear()
        history = self._history.setdefault(step.optimizer, [])
        since = history[-1][0] if history else -1
        between = [loss for at, loss in zip(series.steps, series.losses, strict=True) if at > since]
        history.append((step.step, statistics.fmean(values), statistics.median(between)))
        yield from self.evaluate(step, history)

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Iterator[Finding]:
        self.source.hear(topic, facts)
        yield from ()

    def evaluate(self, step: Step, history: list[tuple[int, float, float]]) -> Iterator[Finding]:
        """Judge the evaluations so far: (step, validation loss, median of the training losses before it)."""
        yield from ()


# --- numbers ----------------------------------------------------------------------------------------------------------


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise from step to step, whatever the trend is."""
    jumps = [abs(b - a) for a, b in pairwise(values)]
    return _MAD * statistics.median(jumps) / math.sqrt(2) if jumps else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return how much the last third lies above the first, and that in standard errors."""
    third = max(1, len(values) // 3)
    change = statistics.median(values[-third:]) - statistics.median(values[:third])
    error = 1.2533 * noise(values) * math.sqrt(2 / third)
    return change, (change / error if error else math.copysign(math.inf, change) if change else 0.0)


def detrended(values: Sequence[float]) -> list[float]:
    """Return what is left without the straight line of least squares."""
    n = len(values)
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    slope = math.fsum((i - middle) * (v - mean) for i, v in enumerate(values)) / (n * (n * n - 1) / 12)
    return [v - mean - slope * (i - middle) for i, v in enumerate(values)]


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of a series without trend with itself `lag` steps later."""
    total = math.fsum(v * v for v in values)
    pairs = zip(values, values[lag:], strict=False)
    return math.fsum(a * b for a, b in pairs) / total * len(values) / (len(values) - lag) if total else 0.0


def period(values: Sequence[float], least: float) -> tuple[int, float] | None:
    """Return the period of a series and its autocorrelation there, if that is `least` and the swing is a real one."""
    rest = detrended(values)
    if (back := autocorrelation(rest, 1)) <= -least:
        return 2, -back
    best: tuple[int, float] | None = None
    for lag in range(4, len(rest) // 3 + 1):
        here = autocorrelation(rest, lag)
        whole = here >= least and autocorrelation(rest, 2 * lag) >= 0.5 * least
        back = min(autocorrelation(rest, between) for between in range(2, lag - 1))
        if whole and back <= -0.2 and (best is None or here > best[1] + 0.1):
            best = lag, here
    return best


def swing(values: Sequence[float]) -> float:
    """Return the distance of the 10th from the 90th percentile of what is left without a trend."""
    ordered = sorted(detrended(values))
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]


# --- the shape --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """What a loss curve looks like, and the steps that show it."""

    kind: str
    since: int
    until: int


def diverged(series: Series, factor: float, count: int) -> bool:
    """Tell whether the newest losses have left the earlier level upwards and stay away."""
    losses = list(series.losses)
    if len(losses) < 2 * count or not math.isfinite(series.best):
        return False
    last = losses[-count:]
    first, best = series.first, series.best
    scale = max(first - best, series.best_spread, 0.1 * abs(best), 1e-12)
    falls = statistics.median(last[count // 2 :]) < 0.9 * statistics.median(last[: count // 2])
    lowest, rise = min(last), statistics.median(last) - best
    recent = rise - (statistics.median(losses[-2 * count : -count]) - best)
    far = lowest > best + factor * scale and lowest > best + abs(best) and lowest > first + 0.5 * abs(first)
    # a target that moves takes the loss along slowly; what breaks does it at once, or faster and faster
    return far and not falls and recent > 0.5 * rise


def classify(steps: Sequence[int], losses: Sequence[float], config: Mapping[str, Any] | None = None) -> Shape | None:
    """Say what a whole curve looks like: diverging, oscillating, flat, plateau, spike or healthy; None if too short."""
    if len(losses) < 16:
        return None
    limit: Callable[[str], float] = lambda name: threshold(config or {}, name)  # noqa: E731 - one word for all
    series = Series()
    for step, loss in zip(steps, losses, strict=True):
        series.add(step, loss, math.nan)
    if diverged(series, limit("diverged_factor"), int(limit("diverged_steps"))):
        return Shape("diverging", series.steps[-int(limit("diverged_steps"))], steps[-1])
    window = list(losses[-64:])
    level = abs(statistics.median(window)) or 1e-12
    swings = len(window) >= 32 and swing(window) >= limit("oscillation_amplitude") * level
    if swings and period(window, limit("oscillation")) is not None:
        return Shape("oscillating", steps[-len(window)], steps[-1])
    change, z = trend(losses)
    if _is_flat(change, z, level):
        return Shape("flat", steps[0], steps[-1])
    return _settled(steps, losses, change, limit("spike_height"))


def _is_flat(change: float, errors: float, level: float) -> bool:
    return abs(change) < 0.02 * level and (abs(errors) < 3 or abs(change) < 0.005 * level)


def _settled(steps: Sequence[int], losses: Sequence[float], change: float, height: float) -> Shape:
    tail = list(losses[len(losses) // 3 :])
    level = abs(statistics.median(tail)) or 1e-12
    later, z = trend(tail)
    if change < 0 and _is_flat(later, z, level):
        return Shape("plateau", steps[len(losses) // 3], steps[-1])
    highest = max(range(len(losses)), key=lambda i: losses[i])
    around = [*losses[max(0, highest - 20) : highest], *losses[highest + 1 : highest + 21]]
    middle, spread = statistics.median(around), max(around) - min(around)
    if highest > 8 and losses[highest] - middle > max(height * spread, 0.5 * abs(middle)):
        return Shape("spike", steps[highest], steps[highest])
    return Shape("healthy" if change < 0 else "rising", steps[0], steps[-1])


# --- examples ---------------------------------------------------------------------------------------------------------


def wobble(number: int) -> float:
    """Return noise between -1 and 1 that is the same in every run."""
    return math.sin(12.9898 * number + 1.3) * 43758.5453 % 2 - 1


def losses(count: int, loss: Callable[[int], float], **fields: Any) -> tuple[Step, ...]:
    """Return steps of two ranks whose loss follows the step; fields that are functions do so too."""
    return tuple(
        step_at(i, world=2, loss=loss(i), **{k: v(i) if callable(v) else v for k, v in fields.items()})
        for i in range(count)
    )
