"""HLTH712: validation loss rises while training loss falls."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddpdebug.detectors.base import Examples
from ddpdebug.detectors.hlth.curve import Evaluation, Series, ValidationRule, losses, wobble
from ddpdebug.detectors.hlth.shapes import best_of, overfitting
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step


class Overfitting(ValidationRule):
    """Over the window training loss keeps falling and validation loss has a persistent upward trend.

    What was said ends when the validation loss is back at its best value. If it falls on from there, that is told as an
    `info` of HLTH716 (delayed generalisation): waiting is what that code is about.

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
    fires_on = Examples(
        lambda: (
            losses(
                60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * abs(i - 20) if i % 5 == 4 else math.nan
            ),
            losses(20, lambda i: 2.0 - 0.1 * i, val_loss=lambda i: 1.0 + 0.1 * abs(i - 4)),
        )
    )
    silent_on = Examples(
        lambda: (
            losses(
                120, lambda i: 2.0 * 0.97**i, val_loss=lambda i: 1.0 + 0.2 * wobble(3 * i) if i % 4 == 3 else math.nan
            ),
            losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * wobble(i) if i % 5 == 4 else math.nan),
            losses(
                60, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * i if i % 5 == 4 else math.nan
            ),  # training as well
            losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.2 * 0.95**i + (0.5 if i == 44 else 0.0)),
            losses(60, lambda i: 2.0 * 0.95**i),
        )
    )

    def evaluate(self, step: Step, series: Series, history: list[Evaluation]) -> Iterator[Finding]:
        best = best_of(history)
        if best is history[-1]:
            self.open.discard(step.optimizer)
        shape = overfitting(history, self.limit)
        if shape is None or not self.once(step, ""):
            return
        self.open.add(step.optimizer)
        yield self.finding(
            step=shape.since,
            last_step=step.step,
            ranks=tuple(step.rows),
            subject=("val_loss",),
            location=self.source.location(),
            evidence={
                "curve": str(shape),
                "best": best.validation,
                "now": history[-1].validation,
                "training_then": best.training,
                "training_now": history[-1].training,
                "evaluations_since": len(history) - 1 - history.index(best),
                **self.source.evidence(),
            },
        )
