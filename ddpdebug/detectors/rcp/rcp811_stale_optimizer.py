"""RCP811: the optimizer holds parameters that the model no longer uses."""

from __future__ import annotations

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import MissingParameters, MovedParameters

_FACT = {
    "kind": "missing",
    "step": 8,
    "missing": ["head.weight"],
    "number": 1,
    "share": 0.1,
    "orphans": ["a parameter of shape (10, 64)"],
}
_MOVED: Fields = {
    "title": "the optimizer moves parameters that need no gradient",
    "phase": "frozen",
    "causes": (
        "frozen by `requires_grad_(False)` in training, and `zero_grad(set_to_none=False)` leaves a gradient of zeros",
        "gradients that are views of one flat buffer, or are set to zeros by hand, never become None",
        "gradients that were left from before the freezing are used in every step",
    ),
    "actions": (
        "set `p.grad = None` for what is frozen, or take it out: build a new optimizer over what trains",
        "clear with `zero_grad()`, whose default sets gradients to None",
    ),
}


class StaleOptimizer(EventRule):
    """Parameters in the optimizer's groups are not among those of the model that is trained, or are frozen there.

    A frozen one moves where a gradient is left to it: zeroed it is still one, and momentum and weight decay go on.

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
    events = ("audit:missing", "audit:moved")
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: {"kind": "moved", "step": 30, "names": ["body.w"], "number": 1}}),
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "missing": ["a", "b"], "number": 2}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "orphans": []}}),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "kind": "frozen"}}),
    )

    def judge(self, fact: MissingParameters | MovedParameters) -> Fields | None:
        if isinstance(fact, MovedParameters):
            return {**_MOVED, "subject": fact.names[:MAX_NAMES], "evidence": {"parameters": fact.number}}
        if not fact.orphans:
            return None
        evidence = {"held_instead": list(fact.orphans), "parameters_in_no_optimizer": fact.number}
        return {"subject": fact.missing[:MAX_NAMES], "evidence": evidence}
