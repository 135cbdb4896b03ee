"""RCP801: the initial loss is far from the expected one."""

from __future__ import annotations

import math

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema import announcements

_FACT = {"kind": "initial", "step": 0, "classes": 10, "loss": 40.0}


class InitialLoss(EventRule):
    """The first loss of the run lies far above what an uninformed model should have: log C for C classes.

    Impact: well above: the model is confidently wrong and spends its first steps on unlearning. Well below: it
    knows the answer (leak, loaded weights), or the loss is not what it seems.

    Diagnosis: print std and mean of the logits of the first batch: about 0 to 1 is expected. Divide the loss by log
    C: a clean factor is a reduction or scaling, such as a sum over positions. Evaluate the loss with
    `torch.zeros_like(logits)`; if that is not log C, the loss or the number of classes is wrong, not the model.

    Causes:
    - logits too large at the start: an embedding of std 1 tied to the output, no final norm, bad gain
    - `reduction="sum"`, a loss multiplied by a weight, or a loss divided by accumulation steps before it is logged
    - a wrong number of classes, or padding and ignored labels counted
    - weights from a checkpoint (then a low value is right)
    - softmax already applied, or the target visible in the input (RCP802, RCP821)

    Remedy:
    - initialise the output layer small (std 0.02, or zeros) and its bias to the log of the class frequencies when
      classes are unbalanced; the expected loss is then the entropy of these frequencies
    - use `reduction="mean"` with `ignore_index`
    - standardise regression targets
    - for a fine-tuning run state the expectation instead
    """

    code = "RCP801"
    severity = Severity.WARNING
    title = "the initial loss is far from the expected one"
    events = ("loss:initial",)
    initial_loss_above = Threshold(
        4,
        "how far the first loss lies above log C, in nats",
        source="logits with a standard deviation of s cost about s^2/2 more than log C: 4 is s = 2.8",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),
        lambda: (Facts(topic="alone:loss", values={1: {**_FACT, "classes": 2, "loss": 5.5}}), *steps(2)),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "loss": 2.4}}),
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "loss": 0.01}}),  # loaded weights
        lambda: Facts(
            topic="alone:loss",
            values={0: {"kind": "range", "step": 0, "loss": "BinaryCrossEntropy", "low": 0, "high": 9}},
        ),
    )

    def judge(self, fact: announcements.InitialLoss) -> Fields | None:
        expected = math.log(max(2, fact.classes))
        if fact.loss <= expected + self.initial_loss_above:
            return None
        return {"evidence": {"loss": fact.loss, "expected": round(expected, 4), "classes": fact.classes}}
