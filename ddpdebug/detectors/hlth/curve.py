"""The series that the rules about the loss read, and robust numbers that noise and schedules do not move."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, ClassVar, NamedTuple

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.hlth.validation import ValidationSource
from ddpdebug.detectors.kinds import Detector, Fields, Findings, Step, Threshold
from ddpdebug.schema.robust import MEDIAN_ERROR, deviation
from ddpdebug.schema.row import Flag

#: Losses that are kept; the best level is remembered for longer.
KEPT = 512
_NOT_TAKEN = Flag.SKIPPED | Flag.GUARD_SKIPPED


@dataclass(frozen=True, slots=True)
class Shape:
    """What a loss curve looks like, and the steps that show it."""

    kind: str
    since: int
    until: int

    def __str__(self) -> str:
        return f"{self.kind}, steps {self.since} to {self.until}"


class Evaluation(NamedTuple):
    """A validation loss that was told, and the median of the training losses since the one before."""

    step: int
    validation: float
    training: float


@dataclass(slots=True)
class Series:
    """The losses of one optimizer's steps, each the mean over the ranks."""

    restart: float  # a learning rate that rises by this factor begins something new
    block: int  # losses whose median is a level
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0
    begun: int | None = None  # the first of them
    first: float = math.nan  # level of the first steps
    best: float = math.inf  # lowest level of a block so far, without the newest
    best_spread: float = 0.0
    newest: deque[float] = field(default_factory=deque)  # of three blocks
    low: float = math.inf  # lowest learning rate since it has risen
    risen: int = 0  # the count at which it did
    high: float = 0.0  # highest learning rate since the last restart
    fallen: bool = False  # from there, as far as a restart rises
    again: int = 0  # the count at which it last rose after a fall; a warm-up rises from the start
    rates: deque[float] = field(default_factory=deque)  # of three blocks
    best_rate: float = math.nan  # the learning rate of the best level

    def add(self, step: int, loss: float, rate: float) -> None:
        """Add a step."""
        self.begun = step if self.begun is None else self.begun
        self.steps.append(step)
        self.losses.append(loss)
        self.newest.append(loss)
        self.rates.append(rate)
        blocks = 3 * self.block
        if len(self.newest) > blocks:
            self.newest.popleft()
            self.rates.popleft()
        self.rated(rate)
        if self.count <= self.block:
            self.first = statistics.median(self.losses)
        if len(self.newest) == blocks:
            recent = list(self.newest)
            if (level := statistics.median(recent[: self.block])) < self.best:
                around = recent[: 2 * self.block]
                self.best, self.best_spread = level, max(around) - min(around)
                self.best_rate = max(islice(self.rates, self.block))

    def rated(self, rate: float) -> None:
        """Add a step of which only the learning rate counts."""
        self.count += 1
        if not math.isfinite(rate):
            return
        if rate > self.restart * self.low:
            self.risen = self.count
            if self.fallen:
                self.again, self.high, self.fallen = self.count, rate, False
            self.low = rate
        self.low, self.high = min(self.low, rate), max(self.high, rate)
        self.fallen |= self.restart * rate < self.high

    @property
    def span(self) -> int:
        """Steps from the first one to the newest, those included that were not watched."""
        return 0 if self.begun is None else self.steps[-1] - self.begun + 1

    def head(self, number: int) -> list[float]:
        """Return the first losses; none once they are no longer kept."""
        return list(islice(self.losses, number)) if self.count <= len(self.losses) else []

    def restarted(self, window: int) -> bool:
        """Whether the learning rate has risen within the last steps."""
        return bool(self.risen) and self.count - self.risen < window

    def rose_again(self, window: int) -> bool:
        """Whether it has done so after a fall: a cycle, a warm restart; not a warm-up."""
        return bool(self.again) and self.count - self.again < window

    def last(self, count: int) -> list[float]:
        """Return the newest losses, the oldest of them first."""
        return list(islice(reversed(self.losses), count))[::-1]


def loss_of(step: Step) -> float | None:
    """Return the mean over the ranks; None where some rank has no finite loss, or the step was not taken."""
    return None if step.any(_NOT_TAKEN) else step.mean_loss


class CurveRule(Detector):
    """A rule that follows losses or learning rates."""

    level_steps = Threshold(
        4,
        "losses whose median is a level, the first or the best one",
        source="the median of four forgets one outlier",
    )
    rate_restart = Threshold(
        1.5,
        "rise of the learning rate over its lowest value that begins a warm-up, cycle or restart",
        source="cycles rise by a factor of 3 and more (Smith 2017), warm restarts by more (Loshchilov, Hutter 2017)",
    )

    def new_series(self) -> Series:
        """An empty series."""
        return Series(restart=self.rate_restart, block=int(self.level_steps))


@dataclass(slots=True)
class _Kind:
    """The kind of losses of an optimizer that is followed, where several train in turn (a lazy regularisation)."""

    number: int
    absent: int = 0  # steps since the newest one
    longest: int = 1  # that the followed one was absent, also before another one has become it


class Followed(NamedTuple):
    """Whether a step's loss is of the kind that is followed, and whether that begins with it."""

    loss: bool
    anew: bool


class LossRule(CurveRule):
    """A rule that reads the losses of each optimizer, those of one kind."""

    topics: ClassVar[tuple[str, ...]] = ("alone",)
    reads = ("loss",)

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self.source = ValidationSource()
        self.told: set[tuple[int, str]] = set()
        self.history: dict[int, list[Evaluation]] = {}  # for the rules that take it in
        self._validation: dict[int, float] = {}  # optimizer -> the newest loss that is not in it

    @property
    def series(self) -> dict[int, Series]:
        """The series of each optimizer."""
        series: dict[int, Series] = self.shared.setdefault("losses", {})
        return series

    def can_show(self, step: Step) -> bool:
        return False  # said once

    def detect(self, step: Step) -> Findings:
        series = self._followed(step)
        if (value := self.source.value(step)) is not None:
            self._validation[step.optimizer] = value
        if series is not None:
            yield from self.judge(step, series)

    def _followed(self, step: Step) -> Series | None:
        """Add a step, once for all rules; return the series, None where the step has no such loss."""
        newest, series = self.shared.get("loss", (None, None))
        if newest is not step:
            series, loss, known = None, loss_of(step), followed(step, self.shared)
            if loss is not None and known.loss:
                series = None if known.anew else self.series.get(step.optimizer)
                series = self.series[step.optimizer] = series or self.new_series()
                series.add(step.step, loss, next(iter(step.rows.values())).lr)
            self.shared["loss"] = step, series
        found: Series | None = series
        return found

    def judge(self, step: Step, series: Series) -> Findings:
        """Judge a series to which a step was added."""
        yield from ()

    def evaluated(self, step: Step, series: Series) -> bool:
        """Add the validation loss of a step; return whether there is one."""
        value = self._validation.pop(step.optimizer, None)
        if value is None:
            return False
        if self.source.renewed():
            self.history.clear()
        history = self.history.setdefault(step.optimizer, [])
        since = history[-1].step if history else -1
        between = [loss for at, loss in zip(series.steps, series.losses, strict=True) if at > since]
        history.append(Evaluation(step.step, value, statistics.median(between)))
        return True

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        self.source.hear(topic, facts)
        yield from ()

    def once(self, step: Step, phase: str) -> bool:
        """Whether this was not said before of this optimizer."""
        key = (step.optimizer, phase)
        new = key not in self.told
        self.told.add(key)
        return new


class ValidationRule(LossRule):
    """A rule that reads the validation losses, told or seen, each with the training loss since the one before.

    What such a rule has said ends when `open` has lost the optimizer: a validation loss may recover.
    """

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self.open: set[int] = set()  # optimizers of which something is said that still holds

    def can_show(self, step: Step) -> bool:
        return step.optimizer not in self.open

    def judge(self, step: Step, series: Series) -> Findings:
        if self.evaluated(step, series):
            yield from self.evaluate(step, series, self.history[step.optimizer])

    def evaluate(self, step: Step, series: Series, history: list[Evaluation]) -> Findings:
        """Judge the evaluations so far."""
        yield from ()


def followed(step: Step, shared: dict[str, Any]) -> Followed:
    """Return whether the loss of a step is of the kind that the rules of a run follow for its optimizer.

    That is the first kind, until it has been absent for more than twice as long as ever before.

    Args:
        shared: what the rules share.
    """
    newest, found = shared.get("followed", (None, None))
    if newest is not step:
        kinds: dict[int, _Kind] = shared.setdefault("kinds of losses", {})
        number, known = next(iter(step.rows.values())).loss_kind, kinds.get(step.optimizer)
        if known is None:
            known = kinds[step.optimizer] = _Kind(number)
        absent = known.absent + (number != known.number)
        if anew := absent > 2 * known.longest:
            known.number = number
        if number == known.number:
            known.longest, absent = max(known.longest, absent), 0
        known.absent = absent
        shared["followed"] = step, (found := Followed(number == known.number, anew))
    answer: Followed = found
    return answer


# --- numbers ----------------------------------------------------------------------------------------------------------


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise from step to step, whatever the trend is."""
    return deviation(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return how much the last third lies above the first, and that in standard errors."""
    third = max(1, len(values) // 3)
    change = statistics.median(values[-third:]) - statistics.median(values[:third])
    error = MEDIAN_ERROR * noise(values) * math.sqrt(2 / third)
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


def swing(values: Sequence[float]) -> float:
    """Return the distance of the 10th from the 90th percentile of what is left without a trend."""
    ordered = sorted(detrended(values))
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]


# --- examples ---------------------------------------------------------------------------------------------------------


def sample_noise(number: int) -> float:
    """Return noise between -1 and 1 that is the same in every run."""
    return math.sin(12.9898 * number + 1.3) * 43758.5453 % 2 - 1


def losses(count: int, loss: Callable[[int], float], **fields: Any) -> tuple[Step, ...]:
    """Return steps of two ranks whose loss follows the step; fields that are functions do so too."""
    return tuple(
        step_at(i, world=2, loss=loss(i), **{k: v(i) if callable(v) else v for k, v in fields.items()})
        for i in range(count)
    )
