"""SYNC201: gradients differ, and no more telling code explains why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpdebug.detectors.comparison import averaging_groups
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Finding, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, find_unused, hooks, missing, odd_ranks
from ddpdebug.detectors.sync.sync206_changed_after_reduction import ChangedAfterReduction
from ddpdebug.schema.details import Gradients, is_part
from ddpdebug.schema.row import Flag

_ODD: dict[int, Any] = {1: {"grads_digest": 5}}
_UNUSED = (
    "`{names}` got no gradient on rank {ranks} while `find_unused_parameters` is off: its bucket was never reduced"
)
_SHARDED: dict[str, Any] = {
    "flags": Flag.SHARDED | Flag.NO_DDP,
    "grads_digest": 0,
    "class_0_key": 11,
    "class_0_grads": 7,
}
_SHARED_CAUSES = (
    "`left out`: `fully_shard` leaves the parameter alone (`ignored_params`, or it came later): nothing averages it",
    "`model inputs`: ranks that share a batch are fed, or drop out, different elements: by the global rank",
    "each rank has a part of the gradient, and nothing adds these up: `to_local()` without `grad_placements`",
    "`set_requires_all_reduce(False)` or `set_requires_gradient_sync(False)` was still in force at the step",
    "a parameter got no gradient on some ranks: an expert without tokens",
)
_SHARED_ACTIONS = (
    "`left out`: let `fully_shard` have it, or average its gradient before the step: `dist.all_reduce(p.grad)`",
    '`model inputs`: split the data, and seed dropout, by the data dimension alone: `mesh["dp"].get_local_rank()`',
    "reduce the gradient over the named dimension of the mesh, or say `to_local(grad_placements=[Partial()])`",
    "switch the reduction on before the last micro-batch",
)


class GradientsDiffer(GradientRule):
    """The gradients that the optimizer is about to use are not the same on all ranks.

    Impact: the ranks apply different updates and part from this step on. DDP's promise is broken, and DDP does not
    look.

    Diagnosis: compare `p.grad.norm()` of the named parameters on all ranks at three places: right after
    `loss.backward()`, after your own gradient code, and before `optimizer.step()`. Unequal already after `backward()`
    means that the reduction did not cover the parameter; unequal only later means that your code changed it.

    Causes:
    - `hook`: a comm hook or a manual `all_reduce` that covers some parameters only, or returns before it has finished
    - `without gradient`: a parameter that took no part in the forward of some rank, with
      `find_unused_parameters=False`: DDP waits for its gradient and never reduces the bucket
    - `none was seen`: gradients come from `torch.autograd.grad`, past the hooks by which DDP reduces them
    - parameters used in a forward that went around DDP besides the one that went through it (two losses, two models)
    - the same model driven by two DDP wrappers, or `backward()` called on some ranks only

    Remedy:
    - `hook`: cover the whole bucket in a comm hook, and return the future of the reduction itself, not one that is done
      already
    - `without gradient`: give every parameter a part in every forward, or pass `find_unused_parameters=True`
    - `none was seen`: call `backward()`, or average what is written into `.grad`: `dist.all_reduce(p.grad)`
    - send every forward that has gradients through the DDP object
    - restart from a checkpoint older than the named step
    """

    code = "SYNC201"
    title = "gradients differ between ranks"
    after = ChangedAfterReduction
    fires_on = Examples(
        lambda: step_at(5, odd=_ODD, gradients=gradients(4, {1: {"w": "ff"}}), contract=contract(4)),
        lambda: step_at(5, world=2, odd=_ODD),
        lambda: step_at(5, **_SHARDED, odd={1: {"class_0_grads": 9}}),
        lambda: step_at(5, odd=_ODD, gradients=gradients(4, {1: {"w": "ff"}}, missing=["b"]), contract=contract(4)),
    )
    silent_on = Examples(
        lambda: (step_at(0), step_at(1)),
        lambda: step_at(5, **_SHARDED, odd={rank: {"class_0_key": 12, "class_0_grads": 8} for rank in (1, 3)}),
        lambda: step_at(5, flags=Flag.LOCAL_ONLY, odd=_ODD),
        lambda: step_at(5, odd=_ODD, contract=contract(4, ddp=0)),
        lambda: step_at(5, world=1),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        evidence: dict[str, Any] = {"hook": own[0]} if (own := hooks(step)) else {}
        if not any(step.columns["micro_batches"]) and not step.any(Flag.CLOSURE | Flag.NO_DDP):
            evidence["backward"] = "none was seen in this step"
        without = missing(step)
        if without and not find_unused(step):
            evidence |= {"without_gradient": without, "find_unused_parameters": False}
        return Verdict(ranks=odd_ranks(step), subject=tuple(differing(step)), evidence=evidence)

    def word(self, step: Step, verdict: Verdict) -> Finding:
        finding = super().word(step, verdict)
        if step.any(Flag.SHARDED):
            evidence = {**_of_shards(step, finding), **finding.evidence}
            return replace(finding, causes=_SHARED_CAUSES, actions=_SHARED_ACTIONS, evidence=evidence)
        without: dict[str, Any] = verdict.evidence.get("without_gradient", {})
        if not without:
            return finding
        rank, names = next(iter(without.items()))
        text = "`without gradient`: " + _UNUSED.format(names=", ".join(names[:3]), ranks=", ".join(without) or rank)
        return replace(finding, causes=(text, *finding.causes))


def _of_shards(step: Step, finding: Finding) -> dict[str, Any]:
    """Return what tells why replicas are at odds: who averages leaves them out, or they are fed differently."""
    replicas = [{*ranks} for ranks in finding.evidence.get("replicas", ())]
    together = [{*ranks} for ranks in averaging_groups(step)]
    if replicas and all(any(own <= ranks for ranks in together) for own in replicas):
        return {} if any(map(is_part, finding.subject)) else {"left_out": "of what FSDP2 averages"}
    for name in ("record_digest", "batch_digest"):
        if step.known(name):
            fed = ({getattr(step.rows[rank], name) for rank in own if rank in step.rows} for own in replicas)
            return {"model_inputs": "differ between these ranks"} if any(len(own) > 1 for own in fed) else {}
    shared = {name for told in step.answers(Gradients).values() for name in told.step_norms if not is_part(name)}
    if 2 * len(differing(step)) > len(shared) > 1:  # a reduction that is missing somewhere leaves others alone
        return {"model_inputs": "not known; most of what these ranks share is at odds"}
    return {}
