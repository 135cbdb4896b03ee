"""RCP802: softmax or sigmoid is applied before a loss that expects logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.base import Examples, Facts
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule
from ddpdebug.schema.announcements import DoubleSoftmax
from ddpdebug.schema.finding import Severity

_FACT = {
    "kind": "double-softmax",
    "step": 0,
    "loss": "BinaryCrossEntropyWithLogits",
    "before": "sigmoid",
    "location": "train.py:58",
}


class SoftmaxBeforeLoss(EventRule):
    """The tensor given to a loss on logits holds probabilities: rows that sum to 1, or all values between 0 and 1.

    Impact: training runs but is slow and never gets confident: over probabilities cross entropy cannot fall below
    log(e + C - 1) - 1, which is 1.46 for 10 classes, and its gradient is weak.

    Diagnosis: print `pred.sum(-1)` and `pred.min(), pred.max()` just before the loss. Read the end of the model's
    forward and the loss line. Note what is expected: `cross_entropy` and `binary_cross_entropy_with_logits` take
    logits, `nll_loss` takes `log_softmax`, `BCELoss` takes probabilities. A second `log_softmax` changes nothing.

    Causes:
    - `nn.Softmax` or `nn.Sigmoid` as the last layer together with a loss on logits
    - `F.nll_loss` on probabilities instead of log probabilities, which makes the loss negative
    - a model meant for inference that returns probabilities
    - a change from `BCELoss` to `BCEWithLogitsLoss` in only one of the two places

    Remedy:
    - return logits from forward and apply softmax only for metrics and inference
    - use `F.cross_entropy(logits, target)` and `F.binary_cross_entropy_with_logits(logits, target)`
    - the metric code needs a change as well if it relied on probabilities; argmax does not
    """

    code = "RCP802"
    severity = Severity.ERROR
    title = "softmax or sigmoid is applied before a loss that expects logits"
    events = ("loss:double-softmax",)
    fires_on = Examples(
        lambda: (
            (Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),),
            (*steps(2), Facts(topic="alone:loss", values={1: {**_FACT, "loss": "NllLoss", "before": "softmax"}})),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(3),
            (Facts(topic="alone:loss", values={0: {"kind": "initial", "step": 0, "classes": 10, "loss": 2.3}}),),
        )
    )

    def judge(self, fact: DoubleSoftmax) -> Mapping[str, Any] | None:
        evidence = {"applied_before": fact.before, "prediction": list(fact.shape)}
        return {"subject": (fact.loss,), "evidence": evidence}
