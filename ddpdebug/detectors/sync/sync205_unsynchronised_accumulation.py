"""SYNC205: the optimizer used gradients of a backward that was not synchronised."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Step, Threshold, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, misuse
from ddpdebug.detectors.sync.sync202_wrapper_bypassed import WrapperBypassed
from ddpdebug.schema.row import Flag

_ODD: dict[int, Any] = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
_LAST: dict[str, Any] = {"no_sync": {"kind": "last-micro-batch", "location": "train.py:41"}}


class UnsynchronisedAccumulation(GradientRule):
    """The last backward before the optimizer step was not reduced, so each rank stepped on its own gradients.

    Impact: the ranks part at this step. If every accumulation window ends so, no gradient is ever synchronised.

    Diagnosis: the phase names the ordering. `last-micro-batch`: the micro-batch before the step still ran under
    `no_sync()`. `forward-only`: the forward ran inside `no_sync()`, the backward after it; DDP decides in the forward.
    `flag-after-forward`: `require_backward_grad_sync` was switched on between forward and backward, which is too late.

    Causes:
    - the condition for `no_sync()` is off by one, or the last window of the epoch is shorter than the others
    - only the forward is indented under `with model.no_sync():`, and `loss.backward()` follows outside
    - `model.require_backward_grad_sync = last` set after the forward, as in loops written for another version
    - an optimizer step that is taken early (end of epoch, time limit) in the middle of a window

    Remedy:
    - put forward and backward of all but the last micro-batch under `no_sync()`, and the last ones outside
    - set `require_backward_grad_sync` before the forward of the micro-batch that it is meant for
    - compute "last" from the batches that remain: `last = i + 1 == len(loader) or (i + 1) % k == 0`
    """

    code = "SYNC205"
    title = "the optimizer stepped on gradients that were not synchronised"
    after = WrapperBypassed
    local_steps = Threshold(
        32,
        "steps within which replicas that train apart must agree again to be local SGD",
        source="periods of 4 and 8 are the defaults of torch and accelerate; a mistake is told so many steps late",
    )
    fires_on = Examples(
        lambda: step_at(
            2, odd=_ODD, flags=Flag.UNSYNCED_BACKWARD, contract=contract(4, **_LAST), gradients=gradients(4)
        ),
        lambda: step_at(2, odd=_ODD, flags=Flag.UNSYNCED_BACKWARD),
    )
    silent_on = Examples(
        lambda: step_at(2, flags=Flag.UNSYNCED_BACKWARD, contract=contract(4, **_LAST)),  # gradients agree
        lambda: (step_at(2, micro_batches=4), step_at(3, micro_batches=4)),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        ranks, found = misuse(step, lambda told: told.no_sync, Flag.UNSYNCED_BACKWARD)
        if not ranks:
            return None
        first = next(iter(found.values()), None)
        kind = first.kind if first else None
        return Verdict(
            ranks=ranks,
            subject=tuple(differing(step)),
            phase=kind,
            location=first.location if first else None,
            evidence={"which": kind},
        )
