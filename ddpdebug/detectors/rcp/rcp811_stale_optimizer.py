"""RCP811: the optimizer holds parameters that the model no longer uses."""

from __future__ import annotations

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import MissingParameters

_FACT = {
    "kind": "missing",
    "step": 8,
    "missing": ["head.weight"],
    "number": 1,
    "share": 0.1,
    "orphans": ["a parameter of shape (10, 64)"],
}


class StaleOptimizer(EventRule):
    """Parameters in the optimizer's groups are not among those of the model that is trained, by identity.

    Impact: the optimizer updates orphans while their replacements stay as they are; memory is held for both.

    Diagnosis: compare ids of `model.parameters()` with those in `optimizer.param_groups`, and look for what
    replaced parameters after the optimizer was built: a new head, an adapter or quantisation wrapper, a model built
    or loaded again. Orphans have `p.grad is None` for ever. A loss or sampler with parameters of its own is
    legitimate.

    Causes:
    - a layer or head replaced after the optimizer was built
    - the model was built or loaded again, or deep-copied, and the optimizer kept
    - `load_state_dict(assign=True)`, which puts new Parameters in place of the old ones
    - an adapter or parametrization that registers new parameters

    Remedy:
    - order: build the model, change it, load weights, move it to the device, wrap with DDP, build the optimizer,
      load its state
    - if the model must change later, build a new optimizer, or use `add_param_group` and remove the orphans; wrap
      with DDP again as well (SYNC203)
    """

    code = "RCP811"
    severity = Severity.ERROR
    title = "the optimizer holds parameters that the model no longer uses"
    events = ("audit:missing",)
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "missing": ["a", "b"], "number": 2}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "orphans": []}}),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "kind": "frozen"}}),
    )

    def judge(self, fact: MissingParameters) -> Fields | None:
        if not fact.orphans:
            return None
        evidence = {"held_instead": list(fact.orphans), "parameters_in_no_optimizer": fact.number}
        return {"subject": fact.missing[:MAX_NAMES], "evidence": evidence}
