"""SYNC205: the optimizer used gradients of a backward that was not synchronised."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import contract, gradients, step_at, tables
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Step, Verdict
from ddpdebug.detectors.sync.gradients import GRADIENT_COLUMNS, GradientRule, differing, misuse
from ddpdebug.detectors.sync.local_steps import LOCAL_STEPS
from ddpdebug.detectors.sync.sync202_wrapper_bypassed import WrapperBypassed
from ddpdebug.schema.details import Gradients
from ddpdebug.schema.finding import MAX_NAMES
from ddpdebug.schema.row import Flag

_ODD: dict[int, Any] = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
_LAST: dict[str, Any] = {"no_sync": {"kind": "last-micro-batch", "location": "train.py:41"}}
_SHARDS = Flag.SHARDED | Flag.NO_DDP | Flag.SHARDS_UNREDUCED
_OF_SHARDS: Fields = {
    "phase": "sharded",
    "causes": (
        "`set_requires_gradient_sync(False)`, or `set_requires_all_reduce(False)`, is still on in the last micro-batch",
        "`set_is_last_backward`, or a context of another library, that FSDP2 does not know as the end of a window",
        "an optimizer step that is taken early (end of epoch, time limit) in the middle of a window",
    ),
    "actions": (
        "set both to True before the forward of the last micro-batch, on the module that `fully_shard` got last",
        'compute "last" from the batches that remain: `last = i + 1 == len(loader) or (i + 1) % k == 0`',
    ),
}


class UnsynchronisedAccumulation(GradientRule):
    """The last backward before the optimizer step was not reduced, so each rank stepped on its own gradients.

    Impact: the ranks part at this step. If every accumulation window ends so, no gradient is ever synchronised.

    Diagnosis: the phase names the ordering. `last-micro-batch`: the micro-batch before the step still ran under
    `no_sync()`. `forward-only`: the forward ran inside `no_sync()`, the backward after it; DDP decides in the forward.
    `flag-after-forward`: `require_backward_grad_sync` was switched on between forward and backward, which is too late.
    `sharded`: FSDP2 still held gradients of a backward at the step, which it had not reduced, or not over replicas: the
    step does without them, and a later one gets them.

    Causes:
    - `last-micro-batch`: the condition for `no_sync()` is off by one, or the last window of the epoch is shorter than
      the others
    - `forward-only`: only the forward is indented under `with model.no_sync():`, and `loss.backward()` follows outside
    - `flag-after-forward`: `model.require_backward_grad_sync = last` set after the forward, as in loops written for
      another version
    - an optimizer step that is taken early (end of epoch, time limit) in the middle of a window

    Remedy:
    - put forward and backward of all but the last micro-batch under `no_sync()`, and the last ones outside
    - `flag-after-forward`: set `require_backward_grad_sync` before the forward of the micro-batch that it is meant for
    - compute "last" from the batches that remain: `last = i + 1 == len(loader) or (i + 1) % k == 0`
    """

    code = "SYNC205"
    reads = (*GRADIENT_COLUMNS, Flag.SHARDS_UNREDUCED)
    title = "the optimizer stepped on gradients that were not synchronised"
    after = WrapperBypassed
    local_steps = LOCAL_STEPS
    fires_on = Examples(
        lambda: step_at(
            2, odd=_ODD, flags=Flag.UNSYNCED_BACKWARD, contract=contract(4, **_LAST), gradients=gradients(4)
        ),
        lambda: step_at(2, odd=_ODD, flags=Flag.UNSYNCED_BACKWARD),
        lambda: step_at(2, flags=_SHARDS, gradients=tables(4, {"waiting": ["w"]}, {})),
    )
    silent_on = Examples(
        lambda: step_at(2, flags=Flag.UNSYNCED_BACKWARD, contract=contract(4, **_LAST)),  # gradients agree
        lambda: (step_at(2, micro_batches=4), step_at(3, micro_batches=4)),
    )

    def suspects(self, step: Step) -> bool:
        return step.any(Flag.SHARDS_UNREDUCED) or super().suspects(step)

    def detect(self, step: Step) -> Findings:
        if not (ranks := step.ranks_with(Flag.SHARDS_UNREDUCED)):
            yield from super().detect(step)
            return
        names = sorted({name for told in step.answers(Gradients).values() for name in told.waiting})
        evidence = {"parameters": len(names)}
        yield self.finding(step, ranks=tuple(ranks), subject=tuple(names[:MAX_NAMES]), evidence=evidence, **_OF_SHARDS)

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
