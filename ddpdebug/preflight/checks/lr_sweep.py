"""Analysis of a learning-rate sweep: where the loss falls, where it is lowest, where training diverges. Pure.

The method is that of L. N. Smith, "Cyclical learning rates for training neural networks" (WACV 2017, section 3.3): the
rate grows by a constant factor from step to step, and the loss is looked at as a function of the rate.

| the script's rate | verdict | where the bound comes from |
|---|---|---|
| more than 10 times the rate that breaks training | fail | a warm-up seldom begins below a tenth of its peak |
| at or above the rate that breaks training | warn | Smith 2017: the highest usable rate is where the curve turns |
| less than 1/300 of the lower suggestion | warn | Adam at 1e-4 and fine-tuning keep within that, also of small models |
| no rate lowers the loss | warn; info where the loss scatters by its own size | |
| anything else | pass | |
| zero | info | a warm-up may begin there |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from ddpdebug.preflight.output.results import Check, Plot, Series, Status
from ddpdebug.preflight.output.terminal_plot import draw
from ddpdebug.schema.robust import deviation, spread
from ddpdebug.sinks.words import number

#: Weight of the past in the average that decides when to stop. A sweep of 100 steps over eight decades has 12 steps in
#: a decade, so that this looks back half a decade; fastai's 0.98 is for sweeps of many more steps.
MEMORY = 0.85
#: The same for the curve that the suggestions are read from, which is averaged in both directions.
BOTH_WAYS = 0.7
#: fastai and PyTorch Lightning stop a sweep when the smoothed loss is four times its minimum: it has risen by three.
RISE = 3.0
#: As they do, the first steps are not looked at (the average has seen too little), nor is the last.
SKIP_BEGIN, SKIP_END = 10, 1
#: "One tenth of the rate at the minimum" is the other rule of fastai's: at the minimum itself the loss falls no more.
TENTH = 10.0
#: A fall counts when it is this many times the scatter of the loss around its average (three deviations of a normal
#: distribution), and this part of the loss at the start.
SCATTER, LEAST_FALL = 3.0, 0.01
#: A rate breaks training when this part of the fall is lost again: a bounded loss never rises above its start.
LOST = 0.9
#: Where nothing falls, the curve is shown up to this part above its start.
_LEAST_ROOM = 0.5
NAME = "sweep"
#: See the module's table.
FAR_ABOVE, FAR_BELOW = 10.0, 300.0

_TOO_HIGH = (
    "the learning rate is too high for this optimizer, for example one of SGD's given to Adam",
    "it is the peak of a warm-up that the sweep does not know: then its first steps are lower",
    "gradients are large because of the initialisation or a sum instead of a mean in the loss",
)
_TOO_LOW = (
    "the learning rate is too low, for example one for fine-tuning used from scratch",
    "it is where a warm-up begins: then the peak is what counts",
    "the loss is divided once too often, which SGD feels as a lower rate",
)
_FLAT = (
    "the loss does not depend on what the optimizer trains: frozen, detached, or other parameters",
    "the batches differ by more than a hundred steps can win: the sweep needs larger batches",
    "the model is at a minimum already: a checkpoint, or a loss that begins at its floor",
)


class End(StrEnum):
    """Why a sweep ended."""

    ALL = "the whole range was tried"
    DIVERGED = "the loss rose far above its minimum"
    NONFINITE = "the loss was not finite"
    TIME = "the time was over"


class Stop:
    """The stop criterion of a sweep: the loss's bias-corrected average against its own minimum."""

    def __init__(self) -> None:
        self._average, self._steps = 0.0, 0
        self._first = self._best = math.nan
        self._begin: list[float] = []

    def __call__(self, loss: float) -> bool:
        """Whether to stop after this loss."""
        self._steps += 1
        self._average = MEMORY * self._average + (1 - MEMORY) * loss
        smoothed = self._average / (1 - MEMORY**self._steps)
        if self._steps == 1:
            self._first = self._best = smoothed
        self._best = min(self._best, smoothed)
        if self._steps <= SKIP_BEGIN:
            self._begin.append(loss)
            return False
        # For a positive loss this is "four times the minimum", unless the minimum is next to nothing: then a rise
        # counts against the fall, or against the noise. Losses may be negative (likelihoods, rewards).
        noise = max(self._begin) - min(self._begin)
        return smoothed - self._best > RISE * max(abs(self._best), self._first - self._best, noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The losses of a sweep, and the learning rates that follow from them.

    Args:
        rates: the learning rate of each step, of the group that has the highest.
        losses: before that step's update, over all its micro-batches and ranks.
        end: why it ended there.
        current: the learning rate that the optimizer came with.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    end: End
    current: float

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses averaged forwards and backwards, so that the curve is not shifted to higher rates."""
        forward = _averaged(self._bounded, BOTH_WAYS)
        backward = _averaged(self._bounded[::-1], BOTH_WAYS)[::-1]
        return tuple((a + b) / 2 for a, b in zip(forward, backward, strict=True))

    @property
    def lowest(self) -> int | None:
        """The step of the lowest smoothed loss; None if the loss does not fall."""
        smoothed = self.smoothed[: len(self.losses) - SKIP_END]
        if len(smoothed) <= SKIP_BEGIN:
            return None
        start = _start(smoothed)
        place = min(range(SKIP_BEGIN, len(smoothed)), key=smoothed.__getitem__)
        deviations = [abs(loss - mean) for loss, mean in zip(self.losses, smoothed, strict=False)][:place]
        scatter = deviation(deviations)
        return place if start - smoothed[place] > max(SCATTER * scatter, LEAST_FALL * abs(start)) else None

    @property
    def too_noisy(self) -> bool:
        """Whether the loss scatters so much that a fall could not be seen (rewards, advantages)."""
        start = _start(self.losses)
        scatter = spread(self.losses[:SKIP_BEGIN], start)
        return SCATTER * scatter > abs(start)

    @property
    def steepest(self) -> float | None:
        """The learning rate at which the loss falls fastest, over the logarithm of the rate."""
        last = self.lowest
        if last is None:
            return None
        smoothed = self.smoothed
        inner = range(max(1, SKIP_BEGIN // 2), max(last, SKIP_BEGIN // 2 + 2))
        place = min(inner, key=lambda i: smoothed[i + 1] - smoothed[i - 1])
        return self.rates[place]

    @property
    def tenth(self) -> float | None:
        """One tenth of the rate at the lowest loss."""
        return None if self.lowest is None else self.rates[self.lowest] / TENTH

    @property
    def edge(self) -> float | None:
        """The learning rate from which on the loss loses its fall again, or exceeds its start; None if none does."""
        smoothed, lowest = self.smoothed, self.lowest
        start = _start(smoothed)
        if lowest is None:
            scatter = spread(self.losses[:SKIP_BEGIN], start)
            bound = start + max(LEAST_FALL * abs(start), SCATTER * scatter)
        else:
            bound = start - (1 - LOST) * (start - smoothed[lowest])
        place = len(smoothed)
        while place > (lowest or 0) + 1 and smoothed[place - 1] > bound:
            place -= 1
        if place < len(smoothed):
            return self.rates[place]
        return self.rates[-1] if self.end in {End.DIVERGED, End.NONFINITE} else None

    @property
    def _bounded(self) -> tuple[float, ...]:
        """The losses up to as far above the start as the lowest lies below: the last may be any power of ten."""
        low, start = min(self.losses), _start(self.losses)
        top = start + max(start - low, _LEAST_ROOM * abs(start))
        return tuple(min(loss, top) for loss in self.losses)

    def text(self, width: int = 90) -> str:
        """Return the plot as text for a terminal."""
        return "".join(f"{''.join(text for text, _ in line).rstrip()}\n" for line in draw(self.plot(), width))

    def plot(self) -> Plot:
        """Return the plot: the loss against the learning rate, with the suggested rates."""
        marks = [(self.steepest, "steepest descent"), (self.tenth, "minimum / 10"), (self.edge, "breaks")]
        marks += [(self.current, "the script's")] if self.current > 0 else []
        return Plot(
            title="loss against learning rate",
            x_label="learning rate",
            y_label="loss",
            series=(
                Series(name="smoothed", x=self.rates, y=self.smoothed),
                Series(name="measured", x=self.rates, y=self._bounded),
            ),
            log_x=True,
            marks=tuple((x, text) for x, text in marks if x is not None),
        )


def _start(losses: Sequence[float]) -> float:
    """Return the loss before the rates begin to matter."""
    return median(losses[:SKIP_BEGIN])


def _averaged(values: Sequence[float], memory: float) -> list[float]:
    """Return the exponential averages, each divided by the weight that it really has (bias correction)."""
    average, found = 0.0, []
    for i, value in enumerate(values, 1):
        average = memory * average + (1 - memory) * value
        found.append(average / (1 - memory**i))
    return found


def rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return the learning rates of a sweep, in equal ratios from the lowest to the highest."""
    if steps < 2:
        return [lowest]
    return [math.exp(math.log(lowest) + i / (steps - 1) * math.log(highest / lowest)) for i in range(steps)]


def skipped(words: str) -> Check:
    """Return the result of a check that was not made."""
    return Check(Status.SKIPPED, words)


def verdict(sweep: Sweep) -> Check:
    """Return the verdict on the script's learning rate."""
    if sweep.end is End.TIME or len(sweep.losses) < 2:
        return _unfinished(sweep)
    if sweep.steepest is None or sweep.tenth is None:
        return _flat(sweep)
    advice = f"steepest descent at {number(sweep.steepest, 2)}, minimum / 10 at {number(sweep.tenth, 2)}"
    last = number(sweep.rates[-1], 2)
    edge = f"nothing breaks up to {last}" if sweep.edge is None else f"training breaks at {number(sweep.edge, 2)}"
    words = f"the loss falls fastest at {number(sweep.steepest, 2)}, {edge}"
    current = sweep.current
    if current == 0:
        return _check(Status.INFO, f"{words}; the script begins at a learning rate of 0", sweep)
    words = f"{words}; the script's learning rate is {number(current, 3)}"
    actions = (f"try a learning rate between {_between(sweep)} ({advice})",)
    if sweep.edge is not None and current >= sweep.edge:
        status = Status.FAIL if current > FAR_ABOVE * sweep.edge else Status.WARN
        text = f"{words}: {_times(current / sweep.edge)} times what breaks it"
        return _check(status, text, sweep, code="HLTH710", hypotheses=_TOO_HIGH, actions=actions)
    if current < min(sweep.steepest, sweep.tenth) / FAR_BELOW:
        text = f"{words}: {_times(sweep.steepest / current)} times lower"
        return _check(Status.WARN, text, sweep, code="HLTH709", hypotheses=_TOO_LOW, actions=actions)
    return _check(Status.PASS, f"{words} ({advice})", sweep)


def _unfinished(sweep: Sweep) -> Check:
    if sweep.end is End.TIME:
        return _check(Status.SKIPPED, f"{End.TIME.value} after {len(sweep.losses)} steps", sweep)
    causes = (
        "the loss or a gradient is NaN before anything is trained: see the steps before",
        "the first update alone breaks the model, at whatever rate",
    )
    actions = ("run the script with `ddpdebug run`: it names the operation that makes the first NaN",)
    text = "the loss was not finite from the beginning, at the lowest learning rate"
    steps = {"steps": len(sweep.losses)}
    return _check(Status.FAIL, text, sweep, evidence=steps, code="NUM302", hypotheses=causes, actions=actions)


def _flat(sweep: Sweep) -> Check:
    if sweep.too_noisy:
        words = "the loss scatters by its own size from batch to batch: no learning rate can be told from another"
        return _check(Status.INFO, words, sweep)
    ends = f"{number(min(sweep.losses), 4)} to {number(max(sweep.losses), 4)}"
    text = f"no learning rate from {number(sweep.rates[0], 2)} to {number(sweep.rates[-1], 2)} lowers the loss ({ends})"
    actions = ("see whether one batch can be overfitted, and which parameters get gradients",)
    return _check(Status.WARN, text, sweep, code="HLTH709", hypotheses=_FLAT, actions=actions)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if 10 <= ratio < 1e6 else number(ratio, 2)


def _between(sweep: Sweep) -> str:
    low, high = sorted(rate for rate in (sweep.steepest, sweep.tenth) if rate is not None)
    return f"{number(low, 2)} and {number(high, 2)}"


def _evidence(sweep: Sweep) -> dict[str, Any]:
    return {
        "steepest_descent": sweep.steepest,
        "minimum_by_10": sweep.tenth,
        "breaks_at": sweep.edge,
        "script": sweep.current,
        "steps": len(sweep.losses),
        "ended": sweep.end.value,
    }


def _check(status: Status, summary: str, sweep: Sweep, *, evidence: dict[str, Any] | None = None, **more: Any) -> Check:
    plots = (sweep.plot(),) if sweep.losses else ()
    return Check(status, summary, evidence=_evidence(sweep) if evidence is None else evidence, plots=plots, **more)
