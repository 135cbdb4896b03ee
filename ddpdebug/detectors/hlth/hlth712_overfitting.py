"""HLTH712: validation loss rises while training loss falls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ddpdebug.detectors.hlth.curve import Evaluation, Series, Shape, ValidationRule, losses, sample_noise
from ddpdebug.detectors.kinds import Examples, Findings, Severity, Step, Threshold
from ddpdebug.schema.robust import deviation


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
    overfit_certain = Threshold(
        4,
        "rise of the validation loss over its best, in standard deviations",
        source="the best of many is low by chance: without it every simulated flat and noisy validation was found, "
        "with it 3 to 4 %",
    )
    overfit_evaluations = Threshold(
        3,
        "evaluations in a row above the best validation loss",
        source="Prechelt 1998, Early Stopping - But When?: criterion UP with several successive strips",
    )
    overfit_rise = Threshold(
        0.05,
        "rise of the validation loss over its best value, relative",
        source="Prechelt 1998: generalisation loss GL of 5 %",
    )
    fires_on = Examples(
        lambda: losses(
            60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * abs(i - 20) if i % 5 == 4 else math.nan
        ),
        lambda: losses(20, lambda i: 2.0 - 0.1 * i, val_loss=lambda i: 1.0 + 0.1 * abs(i - 4)),
    )
    silent_on = Examples(
        lambda: losses(
            120, lambda i: 2.0 * 0.97**i, val_loss=lambda i: 1.0 + 0.2 * sample_noise(3 * i) if i % 4 == 3 else math.nan
        ),
        lambda: losses(
            60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.0 + 0.02 * sample_noise(i) if i % 5 == 4 else math.nan
        ),
        lambda: losses(
            60, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * i if i % 5 == 4 else math.nan
        ),  # training as well
        lambda: losses(60, lambda i: 2.0 * 0.95**i, val_loss=lambda i: 1.2 * 0.95**i + (0.5 if i == 44 else 0.0)),
        lambda: losses(60, lambda i: 2.0 * 0.95**i),
    )

    def evaluate(self, step: Step, series: Series, history: list[Evaluation]) -> Findings:
        best = _best(history)
        if best is history[-1]:
            self.open.discard(step.optimizer)
        shape = self.overfitting(history)
        if shape is None or not self.once(step, ""):
            return
        self.open.add(step.optimizer)
        yield self.finding(
            step,
            step=shape.since,
            subject=("val_loss",),
            location=self.source.location(),
            evidence={
                "best_validation_loss": best.validation,
                "validation_loss_now": history[-1].validation,
                "curve": str(shape),
                "training_then": best.training,
                "training_now": history[-1].training,
                "evaluations_since": len(history) - 1 - history.index(best),
                **self.source.evidence(),
            },
        )

    def overfitting(self, history: Sequence[Evaluation]) -> Shape | None:
        """Return since when the validation loss rises while the training loss falls."""
        strips = int(self.overfit_evaluations)
        if len(history) < strips + 2:
            return None
        best = _best(history)
        last = [evaluation.validation for evaluation in history[-strips:]]
        above = best.validation + self.overfit_rise * abs(best.validation)
        rises = min(last) > above and last[-1] == max(last) and best.step < history[-strips].step
        if rises and history[-1].training < best.training and self._stands_out(history, history.index(best), strips):
            return Shape("overfitting", best.step, history[-1].step)
        return None

    def _stands_out(self, history: Sequence[Evaluation], best: int, count: int) -> bool:
        """Whether the newest evaluations lie above those around the best by more than the noise."""
        values = [evaluation.validation for evaluation in history]
        bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        noise = deviation(bends) / math.sqrt(6)  # of the second differences: a trend has no part in it
        around = values[max(0, best - 1) : best + 2]
        return statistics.median(values[-count:]) - statistics.median(around) > self.overfit_certain * noise


def _best(history: Sequence[Evaluation]) -> Evaluation:
    """Return the first evaluation with the lowest validation loss."""
    return min(history, key=lambda evaluation: evaluation.validation)
