"""SYNC208: several ranks train, and nothing synchronises their gradients."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import averaged
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Finding, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, odd_ranks, of_population
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag

_AVERAGED_IN_STEP: dict[int, Any] = {r: {"grads_digest": 0, "foreign_grads_digest": 5 + r} for r in range(4)}
_ODD: dict[int, Any] = {rank: {**own, "params_after_digest": 5 + rank} for rank, own in _AVERAGED_IN_STEP.items()}
_FOREIGN: dict[int, Any] = {rank: {"digests": {}, "foreign": {"w": str(rank)}} for rank in range(4)}


class NoSynchronisation(GradientRule):
    """Several ranks run the training script, no DistributedDataParallel exists, and the gradients differ.

    Ranks that have settings of their own as well (a population, a search) train apart on purpose: that is a warning.
    Nothing is reported where the step leaves equal parameters on all ranks (an optimizer that averages by itself), or
    where the ranks' parameters have other names or shapes, or where each rank sends to another one in the step or
    receives from one (stages of a pipeline), or where those whose gradients differ already differed before the first
    step, and the gradients of others are averaged (experts).

    Impact: the job is as many independent trainings as there are ranks. Each sees its own share of the data, and
    only the copy that is saved survives.

    Diagnosis: search the script for the place where the model should be wrapped, and why it was not reached: a
    condition on the world size, a flag, an exception that was caught. `torch.distributed.get_world_size()` at that
    place should be the number of ranks.

    Causes:
    - the model was never wrapped: a single-GPU script started under torchrun
    - wrapping hangs on a condition that is false (`args.distributed`, world size read before `init_process_group`)
    - the wrapped model is made, but the training uses the bare one and the wrapper is dropped
    - gradients are meant to be averaged by hand, and that code is not reached

    Remedy:
    - `model = DistributedDataParallel(model, device_ids=[local_rank])` after `init_process_group`, and train that
    - or average by hand before each step: `dist.all_reduce(p.grad); p.grad /= world`
    - if the ranks are meant to train apart, run the tool on one of them
    """

    code = "SYNC208"
    title = "several ranks train without any gradient synchronisation"
    fires_on = Examples(
        lambda: step_at(0, odd=_ODD, flags=Flag.NO_DDP, gradients=_FOREIGN, contract=contract(4, ddp=0, groups=[])),
        lambda: step_at(0, odd=_ODD, flags=Flag.NO_DDP),
        lambda: step_at(  # the first step of LoRA: one of its two matrices has a gradient of zeros, on every rank
            0,
            odd=_ODD,
            flags=Flag.NO_DDP | Flag.FIRST,
            gradients={r: {"foreign": {"a": "1", "b": str(r)}, "step_norms": {"a": 0.0, "b": 1.0}} for r in range(4)},
            parameters={r: {"before": {"a": str(r), "b": str(r)}} for r in range(4)},
            contract=contract(4, ddp=0, groups=[]),
        ),
        lambda: step_at(
            0, odd={rank: {**_ODD[rank], "hyper_digest": 5 + rank} for rank in range(4)}, flags=Flag.NO_DDP
        ),
    )
    silent_on = Examples(
        lambda: step_at(0, flags=Flag.NO_DDP, contract=contract(4, ddp=0)),  # averaged by hand
        lambda: step_at(0, odd=_AVERAGED_IN_STEP, flags=Flag.NO_DDP, gradients=_FOREIGN, contract=contract(4, ddp=0)),
        lambda: step_at(0, odd={1: {"grads_digest": 5}}, gradients=gradients(4, {1: {"w": "f"}}), contract=contract(4)),
        lambda: step_at(
            0,
            odd=_ODD,
            flags=Flag.NO_DDP,
            gradients=_FOREIGN,
            contract=contract(4, {rank: {"parameters": str(rank)} for rank in range(4)}, ddp=0),  # stages of a pipeline
        ),
        lambda: step_at(  # stages that are alike
            0,
            odd=_ODD,
            flags=Flag.NO_DDP,
            gradients=_FOREIGN,
            contract=contract(4, {rank: {"messages": True} for rank in range(4)}, ddp=0),
        ),
        lambda: step_at(  # experts that each rank has its own of, beside layers whose gradients are averaged
            0,
            odd=_ODD,
            flags=Flag.NO_DDP | Flag.FIRST,
            gradients={rank: {"foreign": {"expert": str(rank), "head": "1"}} for rank in range(4)},
            parameters={rank: {"before": {"expert": str(rank), "head": "1"}} for rank in range(4)},
            contract=contract(4, ddp=0),
        ),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        wrappers = [told.ddp for told in step.answers(Contract).values()]
        if any(wrappers) or not (wrappers or step.all(Flag.NO_DDP)) or step.any(Flag.SHARDED):
            return None  # FSDP and tensor parallelism reduce without a DDP
        if averaged(step):
            return None
        return Verdict(ranks=odd_ranks(step), subject=tuple(differing(step)), evidence={"ddp_wrappers": 0})

    def word(self, step: Step, verdict: Verdict) -> Finding:
        return of_population(super().word(step, verdict), step, [[rank] for rank in step.rows])
