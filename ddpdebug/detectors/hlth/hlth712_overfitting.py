"""HLTH712: validation loss rises while training loss falls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ddpdebug.detectors.hlth.curve import ValidationRule, losses, wobble
from ddpdebug.findings import Finding, Severity
from ddpdebug.steps import Step

#: In standard deviations of an evaluation. The best of many is low by chance, and many evaluations are looked at.
_CERTAIN = 4.0


class Overfitting(ValidationRule):
    """Over the window training loss keeps falling and validation loss has a persistent upward trend.

    Impact: the model memorises the training data; the best checkpoint lies behind.

    Diagnosis: look at the line that the finding names, if nobody tells the loss (`ddpdebug.observe`): several splits
    that go through one line are one mean. Compare losses that are comparable: training loss is measured under dropout
    and augmentation, and before the update. Look at accuracy as well: loss that rises while accuracy holds is
    overconfidence. Check that evaluation runs in eval mode (RCP805), with the same preprocessing, on a split that does
    not change.

    Causes:
    - capacity or epochs too large for the amount of data
    - too little regularisation: decay, dropout, augmentation
    - validation data from another distribution, or preprocessed differently
    - duplicates in the training data, or a curriculum that moved away from the validation set

    Remedy:
    - stop at the best checkpoint; add data, augmentation, weight decay, dropout or label smoothing
      (`F.cross_entropy(label_smoothing=0.1)`); use a smaller model or fewer epochs
    - calibrate with a temperature if only the loss suffers
    - correct the split first if it is at fault
    """

    code = "HLTH712"
    severity = Severity.WARNING
    title = "validation loss rises while training loss falls"
    fires_on = (
        losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * abs(i - 20) if i % 5 == 4 else math.nan),
        losses(20, lambda i: 2.0 - 0.1 * i, val_loss=lambda i: 1.0 + 0.1 * abs(i - 4)),
    )
    silent_on = (
        losses(120, lambda i: 2.0 * 0.97**i, val_loss=lambda i: 1.0 + 0.2 * wobble(3 * i) if i % 4 == 3 else math.nan),
        losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * wobble(i) if i % 5 == 4 else math.nan),
        losses(60, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * i if i % 5 == 4 else math.nan),  # training as well
        losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.2 * 0.95**i + (0.5 if i == 44 else 0.0)),
        losses(60, lambda i: 2.0 * 0.95**i),
    )

    def evaluate(self, step: Step, history: list[tuple[int, float, float]]) -> Iterator[Finding]:
        strips = int(self.limit("overfit_evaluations"))
        if len(history) < strips + 2:
            return
        best = min(range(len(history)), key=lambda i: history[i][1])
        last = [value for _, value, _ in history[-strips:]]
        at, lowest, training = history[best]
        above = lowest + self.limit("overfit_rise") * abs(lowest)
        rises = min(last) > above and last[-1] == max(last) and best < len(history) - strips
        if rises and history[-1][2] < training and _stands_out(history, best, strips) and self.once(step, ""):
            yield self.finding(
                step=at,
                last_step=step.step,
                ranks=tuple(step.rows),
                subject=("val_loss",),
                location=self.source.location(),
                evidence={
                    "best": lowest,
                    "now": last[-1],
                    "training_then": training,
                    "training_now": history[-1][2],
                    "evaluations_since": len(history) - 1 - best,
                    **self.source.evidence(),
                },
            )


def _stands_out(history: list[tuple[int, float, float]], best: int, count: int) -> bool:
    """Tell whether the newest evaluations lie above those around the best by more than the noise between neighbours."""
    values = [value for _, value, _ in history]
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    noise = 1.4826 * statistics.median(bends) / math.sqrt(6)  # of the second differences: a trend has no part in it
    around = values[max(0, best - 1) : best + 2]
    return statistics.median(values[-count:]) - statistics.median(around) > _CERTAIN * noise
