"""HLTH716: training continues long after validation stopped improving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ddpdebug.detectors import causality
from ddpdebug.detectors.hlth.curve import Evaluation, Series, Shape, ValidationRule, losses
from ddpdebug.detectors.kinds import Examples, Finding, Findings, Severity, Step, Threshold


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
    delayed_evaluations = Threshold(
        5,
        "evaluations without a better validation loss, at a small training loss, before a late fall",
        source="chosen: early stopping with a patience of 3 to 5 evaluations would have ended the run; grokking "
        "takes far longer (Power et al. 2022)",
    )
    delayed_fall = Threshold(
        0.2,
        "relative fall of the validation loss below its best value before",
        source="chosen: four times the generalisation loss of 5 % of Prechelt 1998, more than the noise of an "
        "evaluation",
    )
    delayed_steady = Threshold(2, "evaluations in a row that must lie so low", source="one low value alone is chance")
    delayed_training = Threshold(
        0.05,
        "training loss as a share of its first level, below which it is small",
        source="as `plateau_done`; where a step of the learning rate brings the fall, the training loss before was "
        "larger",
    )
    improvement = Threshold(
        0.005,
        "share by which a validation loss must be lower to be better",
        source="the best of many values falls by chance",
    )
    too_long_evaluations = Threshold(
        10,
        "evaluations since the best validation loss, which is also at least half of all",
        source="Amazon SageMaker Debugger's built-in rule Overtraining: patience_validation 10",
    )
    fires_on = Examples(
        lambda: losses(
            80, lambda i: 2.0 * 0.95**i, val_loss=lambda i: (1.0 if i < 20 else 1.03) if i % 4 == 3 else math.nan
        ),
        lambda: losses(30, lambda i: 2.0, val_loss=lambda i: 1.0 + 0.02 * abs(i - 5)),
        lambda: losses(
            48, lambda i: 2.0 * 0.8**i, val_loss=lambda i: _seldom(i, 1.0 if i < 36 else 0.8 ** (i - 35))
        ),  # grokking
        lambda: losses(
            48, lambda i: 2.0 * 0.8**i, val_loss=lambda i: _seldom(i, 1.0 + i / 9 if i < 32 else 4 * 0.8 ** (i - 32))
        ),
    )
    silent_on = Examples(
        lambda: losses(
            60, lambda i: 2.0 * 0.97**i, val_loss=lambda i: (1.0 if i < 30 else 0.6) if i % 5 == 4 else math.nan
        ),
        lambda: losses(60, lambda i: 2.0 * 0.8**i, val_loss=lambda i: 0.97**i),
        lambda: losses(80, lambda i: 2.0, val_loss=lambda i: 1.0 / (1 + 0.01 * i) if i % 4 == 3 else math.nan),
        lambda: losses(70, lambda i: 2.0, val_loss=lambda i: 1.0 - 0.3 * (i > 35) if i % 4 == 3 else math.nan),
        lambda: losses(80, lambda i: 2.0),
    )

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return finding.phase != "delayed" or cause.code in causality.group("broken")

    def evaluate(self, step: Step, series: Series, history: list[Evaluation]) -> Findings:
        place = 0
        for number, evaluation in enumerate(history):
            if self.improves(evaluation, history[place]):
                place = number
        since = len(history) - 1 - place
        shape = self.late(history, series.first)
        if since < self.too_long_evaluations:
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
            step,
            step=best.step,
            subject=("val_loss",),
            location=self.source.location(),
            evidence={
                "best_validation_loss": best.validation,
                "validation_loss_now": now.validation,
                "curve": str(shape),
                "training_now": now.training,
                "evaluations_since": since,
                **self.source.evidence(),
            },
        )

    def late(self, history: Sequence[Evaluation], first: float) -> Shape | None:
        """Return since when the validation loss waited that has fallen long after the training loss was small."""
        steady = int(self.delayed_steady)
        small = self.delayed_training * abs(first)
        waited: tuple[Evaluation, Evaluation] | None = (
            None  # the best one that was not beaten for so long, the last wait
        )
        best, count = None, 0
        for evaluation in history[:-steady]:
            if best is None or self.improves(evaluation, best):
                best, count = evaluation, 0
            else:
                count += evaluation.training <= small
            if count >= self.delayed_evaluations:
                waited = best, evaluation
        if waited is None:
            return None
        low = waited[0].validation - self.delayed_fall * abs(waited[0].validation)
        falls = all(evaluation.validation < low for evaluation in history[-steady:])
        return Shape("delayed generalisation", waited[0].step, history[-1].step) if falls else None

    def improves(self, evaluation: Evaluation, best: Evaluation) -> bool:
        """Whether a validation loss is better by more than the chance that many values have."""
        return evaluation.validation < best.validation - self.improvement * abs(best.validation)
