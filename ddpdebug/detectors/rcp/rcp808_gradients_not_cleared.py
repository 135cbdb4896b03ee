"""RCP808: gradients are not cleared between steps."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Fields, Severity
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.details import CarriedGradients
from ddpdebug.schema.row import Flag

_OTHERS: dict[str | None, Fields] = {
    "loss": {
        "severity": Severity.WARNING,
        "title": "the optimizer step uses gradients left over from another loss",
        "phase": "another loss",
        "causes": (
            "a GAN: what the one model's loss has left in the other is not cleared before the other's own backward",
            "intended: a part that both losses train, with an optimizer of its own",
        ),
        "actions": (
            "`zero_grad()` of an optimizer right before the backward of its own loss",
            "or `requires_grad_(False)` for what a loss shall not train, while its backward runs",
        ),
    },
    "twice": {
        "severity": Severity.WARNING,
        "title": "backward is called twice on the same loss in one step",
        "phase": "twice",
        "causes": (
            "`loss.backward(retain_graph=True)`, and then backward of a sum in which that loss is as well",
            "backward is called by the loop and by a library or a closure",
            "intended: each call for other parameters (`inputs=`)",
        ),
        "actions": ("call backward once, on the sum of all losses", "drop `retain_graph=True`: the error shows where"),
    },
    "attack": {
        "severity": Severity.WARNING,
        "title": "the optimizer step uses gradients of the loss that changed the input (adversarial example)",
        "phase": "attack",
        "causes": (
            "adversarial examples: the backward that gives `x.grad` fills the parameters' gradients as well",
            "intended: both losses train",
        ),
        "actions": (
            "`torch.autograd.grad(loss, x)` for the input alone",
            "or clear the gradients before the next backward",
        ),
    },
    "again": {
        "severity": Severity.WARNING,
        "title": "activation checkpointing recomputes the forward with different random numbers",
        "phase": "computed again",
        "causes": (
            "activation checkpointing with `preserve_rng_state=False` over dropout: gradients are of another mask",
            "checkpointing by hand that does not put the generators back",
            "intended: a hook that adds noise to gradients",
        ),
        "actions": ("leave `preserve_rng_state` at its default where what is checkpointed draws random numbers",),
    },
}


class GradientsNotCleared(StepHabit):
    """A parameter's gradient at the step still contains the one of the previous step.

    Or it contains what another loss has left there before another optimizer's step, or one loss twice, or is that of
    another forward than the one that made the loss.

    Impact: the update follows the sum of all gradients since the start: it grows, behaves like momentum without
    decay, and often diverges slowly.

    Diagnosis: print `p.grad` at the start of the forward that follows a step: it should be `None` or zero. Plot the
    gradient norm: growth about proportional to the step number is the sign. Under accumulation see that clearing
    happens once per optimizer step.

    Causes:
    - `zero_grad()` is missing, or sits behind a condition that does not hold
    - `zero_grad()` is called on another optimizer than the one that steps
    - parameters outside the optimizer's groups, which `optimizer.zero_grad()` does not reach
    - gradients cleared only at the start of an epoch

    Remedy:
    - call `optimizer.zero_grad(set_to_none=True)` right after each `optimizer.step()`
    - with several optimizers clear each one before its own backward, or use `model.zero_grad()`
    - freeze with `requires_grad_(False)` what no optimizer holds
    """

    code = "RCP808"
    severity = Severity.ERROR
    title = "gradients are not cleared between steps"
    flag = Flag.GRADS_CARRIED
    key = "carried"
    fires_on = Examples(
        lambda: steps(
            3, flags=Flag.GRADS_CARRIED, recipe={r: {"carried": {"location": "train.py:70"}} for r in range(4)}
        ),
        lambda: (*steps(2), *steps(3, start=2, flags=Flag.GRADS_CARRIED)),
        lambda: steps(3, flags=Flag.GRADS_CARRIED, recipe={0: {"carried": {"location": "t.py:7", "kind": "twice"}}}),
    )
    silent_on = Examples(
        lambda: steps(5),
        lambda: steps(2, flags=Flag.GRADS_CARRIED),
        lambda: (step_at(0, flags=Flag.GRADS_CARRIED), step_at(1), step_at(2, flags=Flag.GRADS_CARRIED), step_at(3)),
    )

    def describe(self, about: CarriedGradients) -> dict[str, Any] | None:
        return {"location": about.location, **_OTHERS.get(about.kind, {})}
