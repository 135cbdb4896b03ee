"""HLTH716: training continues long after validation stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ddpdebug.detectors.base import Examples
from ddpdebug.detectors.hlth.curve import Evaluation, Series, ValidationRule, losses
from ddpdebug.detectors.hlth.samples import BROKEN
from ddpdebug.detectors.hlth.shapes import Shape, improves, late
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step


def _seldom(number: int, value: float) -> float:
    return math.nan if (number + 1) % 4 else value


class TrainingTooLong(ValidationRule):
    """The best validation value is many evaluations old and none since came near an improvement.

    Where the validation loss falls at last, long after the training loss was small (grokking, the second descent of a
    double descent), that is said as an `info`, delayed generalisation, and the warning holds no longer. It has this
    code because it is the other end of the same wait, and tells that waiting was worth it.

    Impact: time and money; and the last checkpoint is worse than the best one.

    Diagnosis: look at the line that the finding names, if nobody tells the loss (`ddpdebug.observe`). Compare the age
    of the best value with the noise between evaluations; look at where the schedule stands, since many gains come in
    the final decay. Check that the metric watched is the one that matters and that the evaluation still runs on
    current weights.

    Causes:
    - convergence: the model has learned what it can at this learning rate
    - overfitting (HLTH712)
    - a learning rate that decayed to about 0 too early, or never decayed
    - an evaluation that measures a stale copy of the weights (EMA that is not updated, a cached model)

    Remedy:
    - keep the best checkpoint, not the last
    - stop early with a patience in evaluations, decided on one rank and broadcast, or all-reduced, so that no rank
      stops alone
    - with weight decay and a small training loss a model may still begin to generalise, seldom and late: continue only
      where that is expected (small algorithmic data), from a saved checkpoint
    - if the schedule has not decayed yet, decay now and see whether the value moves
    """

    code = "HLTH716"
    severity = Severity.WARNING
    title = "training continues long after validation stopped improving"
    follows = (*BROKEN, "HLTH712")
    fires_on = Examples(
        lambda: (
            losses(
                80, lambda i: 2.0 * 0.95**i, val_loss=lambda i: (1.0 if i < 20 else 1.03) if i % 4 == 3 else math.nan
            ),
            losses(30, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * abs(i - 5)),
            losses(
                48, lambda i: 2.0 * 0.8**i, val_loss=lambda i: _seldom(i, 1.0 if i < 36 else 0.8 ** (i - 35))
            ),  # grokking
            losses(
                48,
                lambda i: 2.0 * 0.8**i,
                val_loss=lambda i: _seldom(i, 1.0 + i / 9 if i < 32 else 4 * 0.8 ** (i - 32)),
            ),
        )
    )
    silent_on = Examples(
        lambda: (
            losses(
                60, lambda i: 2.0 * 0.97**i, val_loss=lambda i: (1.0 if i < 30 else 0.6) if i % 5 == 4 else math.nan
            ),
            losses(60, lambda i: 2.0 * 0.8**i, val_loss=lambda i: 0.97**i),
            losses(80, lambda i: 2.0, val_loss=lambda i: 1.0 / (1 + 0.01 * i) if i % 4 == 3 else math.nan),
            losses(70, lambda i: 2.0, val_loss=lambda i: 1.0 - 0.3 * (i > 35) if i % 4 == 3 else math.nan),
            losses(80, lambda i: 2.0),
        )
    )

    def folds(self, finding: Finding, cause: Finding) -> bool:
        return finding.phase != "delayed" or cause.code in BROKEN

    def evaluate(self, step: Step, series: Series, history: list[Evaluation]) -> Iterator[Finding]:
        place = 0
        for number, evaluation in enumerate(history):
            if improves(evaluation, history[place], self.limit):
                place = number
        since = len(history) - 1 - place
        shape = late(history, series.first, self.limit)
        if since < self.limit("too_long_evaluations"):
            self.open.discard(step.optimizer)
        elif 2 * since >= len(history) and self.once(step, "overtraining"):
            self.open.add(step.optimizer)
            yield self._report(step, history[place], Shape("overtraining", history[place].step, step.step), since)
        if shape is not None and self.once(step, "delayed"):
            waited = next(evaluation for evaluation in history if evaluation.step == shape.since)
            count = len(history) - 1 - history.index(waited)
            yield replace(
                self._report(step, waited, shape, count),
                severity=Severity.INFO,
                title="the validation loss fell long after the training loss was small: delayed generalisation",
                phase="delayed",
            )

    def _report(self, step: Step, best: Evaluation, shape: Shape, since: int) -> Finding:
        now = self.history[step.optimizer][-1]
        return self.finding(
            step=best.step,
            last_step=step.step,
            ranks=tuple(step.rows),
            subject=("val_loss",),
            location=self.source.location(),
            evidence={
                "curve": str(shape),
                "best": best.validation,
                "now": now.validation,
                "training_now": now.training,
                "evaluations_since": since,
                **self.source.evidence(),
            },
        )
