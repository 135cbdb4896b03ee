"""RCP808: gradients are not cleared between steps."""

from __future__ import annotations

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Severity
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.row import Flag


class GradientsNotCleared(StepHabit):
    """A parameter's gradient at the step still contains the one of the previous step.

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
    )
    silent_on = Examples(
        lambda: steps(5),
        lambda: steps(2, flags=Flag.GRADS_CARRIED),
        lambda: (step_at(0, flags=Flag.GRADS_CARRIED), step_at(1), step_at(2, flags=Flag.GRADS_CARRIED), step_at(3)),
    )
