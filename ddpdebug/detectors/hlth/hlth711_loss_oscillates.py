"""HLTH711: the loss oscillates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

from ddpdebug.detectors.examples import digest, step_at
from ddpdebug.detectors.hlth.curve import (
    LossRule,
    Series,
    Shape,
    autocorrelation,
    detrended,
    losses,
    sample_noise,
    swing,
)
from ddpdebug.detectors.hlth.samples import update_ratio
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.row import Flag

#: The series is judged every so many steps until it fills the window, then once per window.
_EVERY = 16


def _by_size(count: int) -> Sequence[Step]:
    """Return steps whose lists grow over three steps, and shrink over three."""
    length = [3, 8, 20, 60, 20, 8]
    sizes = [Flag.BATCH_SHRANK, *[Flag.BATCH_GREW] * 3, *[Flag.BATCH_SHRANK] * 2] * count
    return losses(count, lambda i: math.log(length[i % 6]) + 0.1 * sample_noise(i), flags=lambda i: sizes[i])


class LossOscillates(LossRule):
    """The loss swings up and down with a persistent amplitude or period that is larger than its earlier noise.

    Impact: progress is slow and the result depends on where the run happens to stop.

    Diagnosis: determine the period. One epoch: the data order repeats or is sorted. The accumulation length or the
    logging interval: an artefact of averaging. The schedule's cycle: the schedule. No period: rate or batch size.
    Smooth over one epoch and see whether a trend is left. Compare with the smoothed loss over all ranks, not rank 0's
    alone.

    Causes:
    - learning rate too high, or momentum too high for it
    - batches too small or too uniform: sorted data, one class or one source at a time
    - a cyclic schedule, or a scheduler stepped at the wrong interval (RCP806)
    - two objectives or two optimizers that pull against each other
    - a shuffle that repeats each epoch (DATA902)

    Remedy:
    - lower the rate or decay it, enlarge the effective batch by accumulation, shuffle over the whole data set with
      `sampler.set_epoch(epoch)`, mix sources inside a batch
    - weigh the loss terms by their gradient norms
    - an average of weights (`torch.optim.swa_utils.AveragedModel`) smooths the result, not the cause
    """

    code = "HLTH711"
    severity = Severity.WARNING
    title = "the loss oscillates"
    oscillation = Threshold(
        0.6,
        "autocorrelation of the detrended loss at its period (of two: its negative at one step)",
        source="white noise of 32 steps exceeds 0.6 by chance in less than one of 1,000 windows (standard error "
        "1/sqrt(n))",
    )
    oscillation_amplitude = Threshold(
        0.25,
        "spread of the detrended loss (10th to 90th percentile) as a share of its level",
        source="a swing that is smaller than this hides no progress",
    )
    oscillation_least = Threshold(
        32, "losses, below which no oscillation is looked for", source="a standard error of 0.18, see `oscillation`"
    )
    oscillation_longer = Threshold(
        0.1,
        "better correlation that a longer period needs to be named",
        source="twice the period of a swing fits as well, but for noise",
    )
    oscillation_opposite = Threshold(
        0.2,
        "autocorrelation between two periods that must be as far below zero",
        source="half a period later a swing has the other sign; a trend that is left has not",
    )
    oscillation_resized = Threshold(
        0.33, "share of steps with another batch size, for sizes to explain a swing", source="chosen"
    )
    oscillation_sizes = Threshold(
        0.7,
        "mean sign of the loss's change times the sign of the size's, from which on sizes explain the swing",
        source="21 changes that have nothing to do with it give 0.7 once in 1,000 times",
    )
    oscillation_update = Threshold(
        0.01,
        "update norm / weight norm that causes a swing from step to step",
        source="ten times the 1e-3 of Karpathy's CS231n notes; two tasks in turn swing as well, at any rate",
    )
    oscillation_window = Threshold(
        64, "newest losses that are looked at together", source="a period of up to a third of it is seen"
    )
    fires_on = Examples(
        lambda: losses(
            48, lambda i: 2.0 + (0.8 if i % 2 else -0.8) + 0.1 * sample_noise(i), param_norm=1.0, update_norm=0.2
        ),
        lambda: losses(96, lambda i: 2.0 + 0.9 * math.sin(2 * math.pi * i / 12) + 0.1 * sample_noise(i)),
        lambda: losses(
            48,
            lambda i: 2.0 + (0.8 if i % 2 else -0.8) + 0.1 * sample_noise(i),
            lr=lambda i: 0.01 * min(i + 1, 20),  # a warm-up
            param_norm=1.0,
            update_norm=0.2,
        ),
    )
    silent_on = Examples(
        lambda: losses(96, lambda i: 2.0 + 0.8 * sample_noise(i)),  # noise
        lambda: losses(96, lambda i: 4.0 * 0.95**i + 0.1 * sample_noise(i)),
        lambda: losses(
            96, lambda i: 2.0 + (0.8 if i % 2 else -0.8), param_norm=1.0, update_norm=1e-3
        ),  # two tasks in turn
        lambda: losses(  # each batch twice, as PPO has it
            96,
            lambda i: 2.0 + (0.8 if i % 2 else -0.8),
            param_norm=1.0,
            update_norm=0.2,
            batch_digest=lambda i: digest(4 + i // 2),
        ),
        lambda: (  # an optimizer for each task beside that of what they share
            step_at(0, world=2, optimizer=1),
            *losses(96, lambda i: 2.0 + (0.8 if i % 2 else -0.8), param_norm=1.0, update_norm=0.2),
        ),
        # a task in every third step, with a head of its own
        lambda: losses(96, lambda i: 3.0 if i % 3 else 1.0, presence_digest=lambda i: digest(1 + (i % 3 == 0))),
        lambda: losses(
            96, lambda i: 2.0 + math.sin(2 * math.pi * i / 12), lr=lambda i: 0.1 + 0.09 * math.sin(math.pi * i / 6)
        ),
        lambda: _by_size(96),
        lambda: losses(96, lambda i: 2.0 + 0.1 * math.sin(2 * math.pi * i / 12) + 0.02 * sample_noise(i)),  # small
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._ratio: dict[int, float] = {}
        self._sizes: dict[int, deque[int]] = {}  # optimizer -> whether each step's batch was larger than the one before
        self._batches: dict[int, deque[int]] = {}  # optimizer -> digests of its batches
        self._parts: dict[int, set[int]] = {}  # optimizer -> digests of which parameters have gradients, two at most

    @property
    def _newest(self) -> dict[int, int]:
        """Optimizer -> its newest step; of those without a loss too, which this rule does not read."""
        known: dict[int, int] = self.shared.setdefault("newest steps", {})
        return known

    def detect(self, step: Step) -> Findings:
        self._newest[step.optimizer] = step.step
        yield from super().detect(step)

    def judge(self, step: Step, series: Series) -> Findings:
        if (ratio := update_ratio(step)) is not None:
            self._ratio[step.optimizer] = ratio
        sizes = self._sizes.setdefault(step.optimizer, deque(maxlen=int(self.oscillation_window)))
        sizes.append(step.any(Flag.BATCH_GREW) - step.any(Flag.BATCH_SHRANK))
        batches = self._batches.setdefault(step.optimizer, deque(maxlen=int(self.oscillation_window)))
        batches.append(int(step.columns["batch_digest"][0]))
        parts = self._parts.setdefault(step.optimizer, set())
        if len(parts) < 2:
            parts.update(int(digest) for digest in step.columns["presence_digest"][:1] if digest)
        if len(parts) > 1:  # steps that train other parts of the model have other losses
            return
        window = int(self.oscillation_window)
        if series.count < self.oscillation_least or series.count % (_EVERY if series.count <= window else window):
            return
        values = series.last(window)
        level = abs(statistics.median(values)) or 1e-12
        if swing(values) < self.oscillation_amplitude * level or series.rose_again(len(values)):
            return
        found = self.period(values)
        if found is None or self._follows_sizes(values, list(sizes)):
            return
        steps, strength = found
        if steps == 2 and not self._is_rate(step.optimizer):
            return
        if self.once(step, ""):
            yield self.finding(
                step,
                step=list(series.steps)[-len(values)],
                subject=("loss",),
                evidence={
                    "curve": str(Shape("oscillating", list(series.steps)[-len(values)], step.step)),
                    "period": f"{steps} steps",
                    "autocorrelation": strength,
                    "swing": swing(values),
                    "loss": level,
                    "update_over_weight": self._ratio.get(step.optimizer),
                },
            )

    def _is_rate(self, optimizer: int) -> bool:
        """Whether a swing from step to step may come of the rate: not of tasks in turn, or of a batch again."""
        batches = self._batches[optimizer]
        again = [one == before for before, one in itertools.pairwise(batches) if one]
        used_twice = any(again) and not all(again)
        large = self._ratio.get(optimizer, 0.0) >= self.oscillation_update
        since = self._newest[optimizer] - int(self.oscillation_window)
        return large and sum(newest > since for newest in self._newest.values()) == 1 and not used_twice

    def _follows_sizes(self, values: Sequence[float], sizes: Sequence[int]) -> bool:
        """Whether the loss rises and falls with the size of the batch: of longer lists, or of texts."""
        changes = [b - a for a, b in itertools.pairwise(values)]
        both = zip(changes, sizes[-len(changes) :], strict=False)
        signed = [math.copysign(size, change * size) for change, size in both if size]
        enough = len(signed) >= self.oscillation_resized * len(changes)
        return enough and abs(statistics.fmean(signed)) >= self.oscillation_sizes

    def period(self, values: Sequence[float]) -> tuple[int, float] | None:
        """Return the period of a series and its autocorrelation there, if both are those of a real swing."""
        rest, least = detrended(values), self.oscillation
        if (back := autocorrelation(rest, 1)) <= -least:
            return 2, -back
        best: tuple[int, float] | None = None
        for lag in range(4, len(rest) // 3 + 1):
            here = autocorrelation(rest, lag)
            whole = here >= least and autocorrelation(rest, 2 * lag) >= least / 2
            back = min(autocorrelation(rest, between) for between in range(2, lag - 1))
            if (
                whole
                and back <= -self.oscillation_opposite
                and (best is None or here > best[1] + self.oscillation_longer)
            ):
                best = lag, here
        return best
