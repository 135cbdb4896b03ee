"""HLTH716: training continues long after validation stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddpdebug.detectors.hlth.curve import ValidationRule, losses
from ddpdebug.detectors.hlth.samples import BROKEN
from ddpdebug.findings import Finding, Severity
from ddpdebug.steps import Step

#: An improvement is lower than the best value before by this share: the best of many values falls by chance.
_LEAST = 0.005


class TrainingTooLong(ValidationRule):
    """The best validation value is many evaluations old and none since came near an improvement.

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
    - if the schedule has not decayed yet, decay now and see whether the value moves
    """

    code = "HLTH716"
    severity = Severity.WARNING
    title = "training continues long after validation stopped improving"
    follows = (*BROKEN, "HLTH712")
    fires_on = (
        losses(80, lambda i: 2.0 * 0.95**i, val_loss=lambda i: (1.0 if i < 20 else 1.03) if i % 4 == 3 else math.nan),
        losses(30, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * abs(i - 5)),
    )
    silent_on = (
        losses(80, lambda i: 2.0, val_loss=lambda i: 1.0 / (1 + 0.01 * i) if i % 4 == 3 else math.nan),
        losses(70, lambda i: 2.0, val_loss=lambda i: 1.0 - 0.3 * (i > 35) if i % 4 == 3 else math.nan),
        losses(80, lambda i: 2.0),
    )

    def evaluate(self, step: Step, history: list[tuple[int, float, float]]) -> Iterator[Finding]:
        best = 0
        for place, (_, value, _) in enumerate(history):
            if value < history[best][1] - _LEAST * abs(history[best][1]):
                best = place
        since, lowest = len(history) - 1 - best, history[best][1]
        if since >= self.limit("too_long_evaluations") and 2 * since >= len(history) and self.once(step, ""):
            yield self.finding(
                step=history[best][0],
                last_step=step.step,
                ranks=tuple(step.rows),
                subject=("val_loss",),
                location=self.source.location(),
                evidence={
                    "best": lowest,
                    "now": history[-1][1],
                    "evaluations_since": since,
                    **self.source.evidence(),
                },
            )
