"""RCP802: softmax or sigmoid is applied before a loss that expects logits."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import LossInput

#: Operations that make probabilities, and what they are called.
_PROBABILITIES = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_FACT = {
    "kind": "input",
    "step": 0,
    "loss": "BinaryCrossEntropyWithLogits",
    "before": ["Sigmoid", "Addmm"],
    "location": "train.py:58",
}
_DIVERGENCE: Fields = {
    "severity": Severity.WARNING,
    "title": "kl_div is given probabilities, and takes their logarithms",
    "phase": "divergence",
    "causes": (
        "`F.kl_div(student.softmax(-1), teacher.softmax(-1))`: only the target is given as probabilities",
        "arguments in the order of the formula KL(p || q): the first one is the prediction",
    ),
    "actions": ("`F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction='batchmean')`",),
}
_UNNORMALISED: Fields = {
    "severity": Severity.WARNING,
    "title": "a loss expects log-probabilities, and its inputs are not normalised",
    "phase": "not normalised",
    "causes": ("logits are given as they are: `nll_loss` and `ctc_loss` have no `log_softmax` inside",),
    "actions": ("`logits.log_softmax(-1)` before the loss, over the classes",),
}


def _given(loss: str, *before: str, total: float | None = None) -> tuple[Facts]:
    fact = {**_FACT, "loss": loss, "before": list(before), "total": total}
    return (Facts(topic="alone:loss", values={1: fact}),)


class SoftmaxBeforeLoss(EventRule):
    """The tensor given to a loss on logits holds probabilities: rows that sum to 1, or all values between 0 and 1.

    Or one on logarithms of probabilities is given logits.

    Impact: training runs but is slow and never gets confident: over probabilities cross entropy cannot fall below
    log(e + C - 1) - 1, which is 1.46 for 10 classes, and its gradient is weak.

    Diagnosis: print `pred.sum(-1)` and `pred.min(), pred.max()` just before the loss. Read the end of the model's
    forward and the loss line. Note what is expected: `cross_entropy` and `binary_cross_entropy_with_logits` take
    logits, `nll_loss` and `kl_div` take `log_softmax`, `BCELoss` takes probabilities; a second `log_softmax` is one.

    Causes:
    - `sigmoid`: `nn.Sigmoid` as the last layer together with a loss on logits
    - `softmax`: `nn.Softmax` as the last layer together with a loss on logits
    - `F.nll_loss` on probabilities instead of log probabilities, which makes the loss negative
    - a model meant for inference that returns probabilities
    - a change from `BCELoss` to `BCEWithLogitsLoss` in only one of the two places

    Remedy:
    - `sigmoid`: return logits from forward and apply sigmoid only for metrics and inference
    - `softmax`: return logits from forward and apply softmax only for metrics and inference
    - use `F.cross_entropy(logits, target)` and `F.binary_cross_entropy_with_logits(logits, target)`
    - the metric code needs a change as well if it relied on probabilities; argmax does not
    """

    code = "RCP802"
    severity = Severity.ERROR
    title = "softmax or sigmoid is applied before a loss that expects logits"
    events = ("loss:input",)
    log_sum = Threshold(
        1.1,
        "sum of probabilities, from their logarithms, above which they are none",
        source="it is 1; rounding of logarithms in 16 bits is within a few percent",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), *_given("NllLoss", "LogSoftmax", "Softmax")),
        lambda: _given("NllLoss2D", "Softmax", "Convolution"),
        lambda: _given("CrossEntropy", "LogSoftmax", "Softmax"),  # soft or smoothed targets
        lambda: _given("KlDiv", "Softmax", "Addmm"),
        lambda: _given("CtcLoss", "Addmm", total=11.2),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _given("NllLoss", "LogSoftmax", "Addmm"),
        lambda: _given("CrossEntropy", "LogSoftmax", "Addmm"),
        lambda: _given("KlDiv", "LogSoftmax", "Addmm"),
        lambda: _given("NllLoss", "LogSoftmax", "LogSoftmax"),  # the second one changes nothing
        lambda: _given("NllLoss", "Addmm", "Softmax"),  # a mixture, however made
        lambda: _given("BinaryCrossEntropyWithLogits", "Addmm", "Sigmoid"),  # the activation of a hidden layer
        lambda: _given("CtcLoss", "Log", "Add", total=1.01),
        lambda: _given("NllLoss"),  # what an older version said of it cannot be read
        lambda: Facts(topic="alone:loss", values={0: {"kind": "initial", "step": 0, "classes": 10, "loss": 2.3}}),
    )

    def judge(self, fact: LossInput) -> Fields | None:
        applied = _probabilities(fact)
        evidence = {"applied_before": applied, "prediction": list(fact.shape)}
        if applied is None and fact.total is not None and fact.total > self.log_sum:
            return {"subject": (fact.loss,), "evidence": {"add_up_to": round(fact.total, 3)}, **_UNNORMALISED}
        if applied is None:
            return None
        return {"subject": (fact.loss,), "evidence": evidence, **(_DIVERGENCE if fact.loss == "KlDiv" else {})}


def _probabilities(fact: LossInput) -> str | None:
    """Say what made probabilities of what the loss takes for logits or log probabilities, None where nothing did."""
    last, before = (*fact.before, "", "")[:2]
    if not fact.loss.startswith(("NllLoss", "CrossEntropy")):
        return _PROBABILITIES.get(last)
    if last == "LogSoftmax":
        return _PROBABILITIES.get(before)
    return "softmax without log" if last == "Softmax" else None
