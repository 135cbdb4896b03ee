"""RCP826: a hook is registered again in each step."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import GrowingHooks as Grown

_FACT: dict[str, Any] = {
    "kind": "hooks",
    "step": 32,
    "since": 0,
    "module": "layer4.1",
    "function": "Trainer.log_features.<locals>.keep",
    "number": 33,
    "location": "train.py:53",
}


class GrowingHooks(EventRule):
    """A hook on a module, or on the gradient of a parameter, is registered again in each step, and none is removed.

    The hooks of all modules are counted after steps 2, 4, 8, and so on.

    Impact: step n runs n of them: steps take longer and longer, what the hooks keep stays in memory, and hooks that
    change a gradient or an output do so n times.

    Diagnosis: look for `register_forward_hook`, `register_full_backward_hook` or `parameter.register_hook` in what a
    step calls. The location is the function that is registered.

    Causes:
    - the hook is registered in the training loop, or in `forward`, and not once before
    - the handle that `register_..._hook` returns is not kept, so that `handle.remove()` is never called
    - a helper that registers its hooks each time that it is called (features, statistics, visualisation)

    Remedy:
    - register the hook once, before the loop
    - or keep the handle and call `handle.remove()` in the same step
    """

    code = "RCP826"
    severity = Severity.WARNING
    title = "a hook is registered again in each step"
    events = ("audit:hooks",)
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "since": 40, "location": None}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {"kind": "moved", "step": 30, "names": ["body.w"], "number": 1}}),
    )

    def judge(self, fact: Grown) -> Fields | None:
        evidence = {"hooks": fact.number, "function": fact.function, "noticed_in_step": fact.step}
        return {"step": fact.since, "subject": (fact.module,), "evidence": evidence}
