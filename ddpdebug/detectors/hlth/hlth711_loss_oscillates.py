"""HLTH711: the loss oscillates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ddpdebug.detectors.base import Examples
from ddpdebug.detectors.examples import digest
from ddpdebug.detectors.hlth.curve import LossRule, Series, losses, period, swing, wobble
from ddpdebug.detectors.hlth.samples import BROKEN, update_ratio
from ddpdebug.detectors.hlth.shapes import Shape
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step

#: The series is judged every so many steps until it fills the window, then once per window.
_EVERY = 16


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
    follows = (*BROKEN, "HLTH710")
    fires_on = Examples(
        lambda: (
            losses(48, lambda i: 2.0 + (0.8 if i % 2 else -0.8) + 0.1 * wobble(i), param_norm=1.0, update_norm=0.2),
            losses(96, lambda i: 2.0 + 0.9 * math.sin(2 * math.pi * i / 12) + 0.1 * wobble(i)),
            losses(
                48,
                lambda i: 2.0 + (0.8 if i % 2 else -0.8) + 0.1 * wobble(i),
                lr=lambda i: 0.01 * min(i + 1, 20),  # a warm-up
                param_norm=1.0,
                update_norm=0.2,
            ),
        )
    )
    silent_on = Examples(
        lambda: (
            losses(96, lambda i: 2.0 + 0.8 * wobble(i)),  # noise
            losses(96, lambda i: 4.0 * 0.95**i + 0.1 * wobble(i)),
            losses(96, lambda i: 2.0 + (0.8 if i % 2 else -0.8), param_norm=1.0, update_norm=1e-3),  # two tasks in turn
            # a task in every third step, with a head of its own
            losses(96, lambda i: 3.0 if i % 3 else 1.0, presence_digest=lambda i: digest(1 + (i % 3 == 0))),
            losses(
                96, lambda i: 2.0 + math.sin(2 * math.pi * i / 12), lr=lambda i: 0.1 + 0.09 * math.sin(math.pi * i / 6)
            ),
            losses(96, lambda i: 2.0 + 0.1 * math.sin(2 * math.pi * i / 12) + 0.02 * wobble(i)),  # small
        )
    )

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._ratio: dict[int, float] = {}
        self._parts: dict[int, set[int]] = {}  # optimizer -> digests of which parameters have gradients, two at most

    def judge(self, step: Step, series: Series) -> Iterator[Finding]:
        if (ratio := update_ratio(step)) is not None:
            self._ratio[step.optimizer] = ratio
        parts = self._parts.setdefault(step.optimizer, set())
        if len(parts) < 2:
            parts.update(int(digest) for digest in step.columns["presence_digest"][:1] if digest)
        if len(parts) > 1:  # steps that train other parts of the model have other losses
            return
        window = int(self.limit("oscillation_window"))
        if series.count < self.limit("oscillation_least") or series.count % (
            _EVERY if series.count <= window else window
        ):
            return
        values = series.last(window)
        level = abs(statistics.median(values)) or 1e-12
        if swing(values) < self.limit("oscillation_amplitude") * level or series.rose_again(len(values)):
            return
        found = period(values, self.limit)
        if found is None:
            return
        steps, strength = found
        if steps == 2 and self._ratio.get(step.optimizer, 0.0) < self.limit("oscillation_update"):
            return
        if self.once(step, ""):
            yield self.finding(
                step=list(series.steps)[-len(values)],
                last_step=step.step,
                ranks=tuple(step.rows),
                subject=("loss",),
                evidence={
                    "curve": str(Shape("oscillating", list(series.steps)[-len(values)], step.step)),
                    "period": f"{steps} steps",
                    "autocorrelation": strength,
                    "swing": swing(values),
                    "level": level,
                    "update_over_weight": self._ratio.get(step.optimizer),
                },
            )
