"""SYNC202: the training forward does not go through DDP."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, misuse
from ddpdebug.detectors.sync.sync211_smaller_group import SmallerGroup
from ddpdebug.schema.row import Flag

_ODD: dict[int, Any] = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
_PLACE: dict[str, Any] = {"bypass": {"location": "train.py:60"}}


class WrapperBypassed(GradientRule):
    """Gradients arrived for DDP's parameters without any forward of the DDP object, and were therefore not reduced.

    Impact: every rank trains alone on its own shard, for as long as the forward goes around the wrapper. Only rank
    0's copy is usually saved, so that the work of the other ranks is lost.

    Diagnosis: look at the call of the model that leads to the named `backward()`. It must be `ddp_model(x)`; neither
    `ddp_model.module(x)`, nor the module that was passed to `DistributedDataParallel`, nor a method such as
    `ddp_model.module.compute_loss(x)` starts a reduction.

    Causes:
    - `model.module(...)` in the training step, often taken over from validation or generation code
    - a method of the inner module called directly, because DDP forwards only `forward`
    - the unwrapped module kept in a trainer, an agent or a closure that was made before wrapping

    Remedy:
    - call the DDP object itself; keep `.module` for `state_dict` and for forwards without gradients
    - move what the other method computes into `forward` (with a `mode` argument if needed)
    - where the forward must go around, reduce the gradients yourself before the step
    """

    code = "SYNC202"
    title = "training runs around the DDP wrapper"
    after = SmallerGroup
    fires_on = Examples(
        lambda: step_at(0, odd=_ODD, flags=Flag.BYPASS, contract=contract(4, **_PLACE), gradients=gradients(4)),
        lambda: step_at(3, odd=_ODD, flags=Flag.BYPASS),
    )
    silent_on = Examples(
        lambda: step_at(0, flags=Flag.BYPASS, contract=contract(4, **_PLACE)),  # gradients agree: reduced by the user
        lambda: (step_at(1), step_at(2)),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        ranks, found = misuse(step, lambda told: told.bypass, Flag.BYPASS)
        if not ranks:
            return None
        location = next((entry.location for entry in found.values() if entry.location), None)
        return Verdict(ranks=ranks, subject=tuple(differing(step)), location=location)
