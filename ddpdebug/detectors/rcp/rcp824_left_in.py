"""RCP824: weights that were put in for an evaluation are trained on."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import LeftInWeights

_FACT: dict[str, Any] = {
    "kind": "left in",
    "step": 60,
    "since": 30,
    "names": ["2.weight", "4.bias"],
    "location": "train.py:53",
}


class LeftIn(EventRule):
    """Before two evaluations weights were written into the model, and the next step has trained on from them.

    A few parameters stand for all. Where weights are also written between steps without an evaluation (clipping by
    hand, averages every few steps), or by `load_state_dict`, nothing is reported.

    Impact: training goes back to an average of its past at each evaluation, with the optimizer's state of other
    weights; adapters that stay merged count twice.

    Diagnosis: keep a copy of one parameter after `optimizer.step()` and compare it with the parameter in the next
    training forward. The location is the evaluation's forward: look at what runs before and after it.

    Causes:
    - averaged weights (EMA, SWA) are copied into the model for the evaluation and not copied out
    - `weights frozen`: adapters (LoRA) are merged into their base weights and not unmerged
    - an optimizer that keeps two sets of weights (schedule-free) was switched to evaluation, and not back to training
    - intended: weights are averaged or pruned just before each evaluation

    Remedy:
    - store the weights before the evaluation and restore them after it, in a context manager or `try`/`finally`
    - or evaluate a copy: `copy.deepcopy(model)` once, into which the averages are copied
    """

    code = "RCP824"
    severity = Severity.WARNING
    title = "weights that were put in for an evaluation are trained on"
    events = ("audit:left in",)
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={0: {**_FACT, "frozen": True}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {"kind": "moved", "step": 30, "names": ["body.w"], "number": 1}}),
    )

    def judge(self, fact: LeftInWeights) -> Fields | None:
        evidence = {"weights": "frozen" if fact.frozen else "trained", "noticed_in_step": fact.step}
        return {"step": fact.since, "subject": fact.names[:MAX_NAMES], "evidence": evidence}
