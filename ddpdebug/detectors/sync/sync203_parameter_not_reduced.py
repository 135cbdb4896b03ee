"""SYNC203: a parameter that no DDP reduces is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ddpdebug.detectors.comparison import MAX_NAMES, averaged
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Finding, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, odd_ranks
from ddpdebug.detectors.sync.sync208_no_synchronisation import NoSynchronisation
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag

_ODD: dict[int, Any] = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
_FOREIGN_ODD: dict[int, Any] = {
    rank: {"foreign_grads_digest": 5 + rank, "foreign_params_digest": 5 + rank} for rank in range(4)
}
_W: dict[int, Any] = {rank: {"w": f"{rank}"} for rank in range(4)}
_FOREIGN: dict[int, Any] = {rank: {"digests": {}, "foreign": {"head.w": str(rank)}} for rank in range(4)}


class ParameterNotReduced(GradientRule):
    """The optimizer steps a parameter whose gradient no DDP reduces, and its gradients differ between ranks.

    Impact: this parameter becomes a different one on every rank, while the others stay equal: the model falls apart
    slowly, and a checkpoint holds one rank's version. With gradient clipping by the total norm all parameters follow.

    Diagnosis: `which` says what happened to each parameter after (or without) `DistributedDataParallel(...)`:
    `unfrozen` (`requires_grad` was off when DDP was made), `added`, `replaced` (another Parameter object under the
    same name), `retyped` (`.double()`, `.half()`, `.to(...)` gave it a new gradient accumulator, even when it was
    turned back), `never-wrapped` (in no DDP at all). Search for that change behind the wrapping.

    Causes:
    - `never-wrapped`: a second module (discriminator, criterion with weights, projection) whose parameters are in the
      optimizer, but that was never wrapped
    - `not averaged by hand`: gradients are averaged by hand, by a list or a test of names that
      leaves some out
    - `tensor parallel`: the ranks hold parts of the layers behind these parameters, and the gradient of what goes into
      such a layer is not summed over the ranks in backward: each rank has a part of it
    - `added`, `replaced`: a head, an adapter or a parametrisation (weight norm) added or swapped after wrapping
    - `retyped`: `model.double().float()`, `.to(dtype)` or a device move after wrapping
    - `unfrozen`: `requires_grad_(True)` after wrapping: gradual unfreezing, a backbone released after warm-up

    Remedy:
    - `never-wrapped`: wrap every module that has trainable parameters, or put them into the one that is wrapped
    - `not averaged by hand`: average these as well: `dist.all_reduce(p.grad); p.grad /= world`
    - `tensor parallel`: put a function before each layer that is split by columns whose forward returns its input, and
      whose backward all-reduces the gradient (the sum, not the mean)
    - `unfrozen`: keep the parameters trainable at wrap time and freeze by `lr=0`, or wrap again
    - make all changes first and wrap last; wrap anew (`DistributedDataParallel(module)`) after every such change
    """

    code = "SYNC203"
    title = "a trained parameter is not reduced by any DDP"
    titles: ClassVar[Mapping[str, str]] = {
        "not averaged by hand": "a trained parameter is left out where gradients are averaged by hand",
        "tensor parallel": "a parameter that all ranks hold gets a part of its gradient on each rank",
    }
    after = NoSynchronisation
    fires_on = Examples(
        lambda: step_at(9, odd=_ODD, gradients=gradients(4, _W), contract=contract(4, unreduced={"w": "unfrozen"})),
        lambda: step_at(
            0,
            odd=_FOREIGN_ODD,
            gradients=_FOREIGN,
            contract=contract(4, unreduced={"head.w": "never-wrapped"}),
        ),
    )
    silent_on = Examples(
        lambda: step_at(
            9, gradients=gradients(4), contract=contract(4, unreduced={"w": "unfrozen"})
        ),  # gradients agree
        lambda: step_at(9, odd=_ODD, gradients=gradients(4, _W), contract=contract(4)),
        lambda: step_at(  # experts by hand: their biases began alike
            0,
            odd=_FOREIGN_ODD,
            flags=Flag.NO_DDP | Flag.FIRST,
            gradients={r: {"foreign": {"own.w": str(r), "own.b": str(r), "head.w": "1"}} for r in range(4)},
            parameters={r: {"before": {"own.w": str(r), "own.b": "0", "head.w": "1"}} for r in range(4)},
            contract=contract(4, unreduced=dict.fromkeys(("own.w", "own.b", "head.w"), "never-wrapped")),
        ),
        lambda: step_at(
            0,
            odd=_FOREIGN_ODD,
            gradients=_FOREIGN,
            contract=contract(4, unreduced={"head.w": "never-wrapped"}, marked=["head.w"]),
        ),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        if step.any(Flag.SHARDED):
            return None  # who reduces what is not DDP's matter alone
        names = differing(step)
        reasons: dict[str, str] = {}
        for told in step.answers(Contract).values():
            reasons.update({name: why for name, why in told.unreduced.items() if name in set(names)})
        if not reasons:
            return None
        found = [name for name in names if name in reasons]
        by_hand = not any(told.ddp for told in step.answers(Contract).values()) and averaged(step)
        # ranks that hold parts of one model have the same loss; those that average get batches of their own
        losses = step.columns["loss"]
        together = by_hand and math.isfinite(losses[0]) and len({*losses}) == 1
        which = sorted(set(reasons.values()))
        return Verdict(
            ranks=odd_ranks(step),
            subject=tuple(found),
            phase="tensor parallel"
            if together
            else "not averaged by hand"
            if by_hand
            else which[0]
            if len(which) == 1
            else None,
            evidence={
                "which": {name: reasons[name] for name in found[:MAX_NAMES]},
                "also_differing": len(names) - len(found),
            },
        )

    def word(self, step: Step, verdict: Verdict) -> Finding:
        found = super().word(step, verdict)
        which = {name: why for name, why in verdict.evidence["which"].items() if name in found.subject}
        return replace(found, evidence={**found.evidence, "which": which})
