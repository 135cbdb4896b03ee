"""SYNC211: the reduction covers fewer ranks than train together."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import islands
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Finding, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, gradient_classes, odd_ranks, of_population
from ddpdebug.detectors.sync.sync203_parameter_not_reduced import ParameterNotReduced
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag

_HALVES: dict[int, Any] = {2: {"grads_digest": 5}, 3: {"grads_digest": 5}}
_GROUPS: dict[int, Any] = {rank: {"groups": [[0, 1] if rank < 2 else [2, 3]]} for rank in range(4)}
_GRADIENTS = gradients(4, {2: {"w": "ff"}, 3: {"w": "ff"}})


class SmallerGroup(GradientRule):
    """DDP or FSDP2 reduces over groups smaller than the world: ranks agree inside their group, not between groups.

    Groups that have settings of their own as well (a population, a search) train apart on purpose: a warning.

    Impact: every group trains a model of its own on a part of the data, with a smaller batch than intended. Inside
    each group everything looks healthy.

    Diagnosis: the evidence lists the groups. Print `ddp_model.process_group.size()` and
    `torch.distributed.get_world_size()`, and find out which group was passed as `process_group=`.

    Causes:
    - a node-local group (made for loading or broadcasting) passed to DDP as `process_group=`
    - `dist.new_group(ranks)` with ranks computed from the local instead of the global rank
    - a device mesh whose data-parallel dimension is smaller than the world by mistake
    - `fully_shard` got a mesh without the dimension over which gradients are to be averaged, or one of one rank

    Remedy:
    - leave `process_group` out, or pass a group of all ranks that should train the same model
    - give `fully_shard` the whole mesh: of two dimensions, it shards over the last and averages over both
    - if the groups are meant to train different models, start them as different jobs
    """

    code = "SYNC211"
    all_ranks = True
    title = "gradients are reduced over a part of the ranks only"
    after = ParameterNotReduced
    fires_on = Examples(
        lambda: step_at(0, odd=_HALVES, gradients=_GRADIENTS, contract=contract(4, _GROUPS)),
        lambda: step_at(
            0,
            world=2,
            odd={1: {"grads_digest": 5}},
            gradients=gradients(2, {1: {"w": "ff"}}),
            contract=contract(2, {0: {"groups": [[0]]}, 1: {"groups": [[1]]}}),
        ),
    )
    silent_on = Examples(
        lambda: step_at(0, gradients=gradients(4), contract=contract(4, _GROUPS)),
        lambda: step_at(0, odd={1: {"grads_digest": 5}}, gradients=gradients(4, {1: {"w": "f"}}), contract=contract(4)),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        if step.any(Flag.SHARDED):
            return _of_shards(step)
        groups = sorted({group for told in step.answers(Contract).values() for group in told.groups})
        classes = gradient_classes(step) or {}
        smaller = [list(group) for group in groups if 1 <= len(group) < step.world]
        # of a reduction that works at least the ranks of each group agree
        if not smaller or any(len({classes[rank] for rank in group if rank in classes}) > 1 for group in smaller):
            return None
        return Verdict(ranks=odd_ranks(step), subject=tuple(differing(step)), evidence={"groups": smaller})

    def word(self, step: Step, verdict: Verdict) -> Finding:
        return of_population(super().word(step, verdict), step, verdict.evidence["groups"])


def _of_shards(step: Step) -> Verdict | None:
    groups = islands(step)
    shared = [shown for shown in step.replicas("grads").values() if len(shown) > 1]
    inside = [{shown[rank] for rank in group if rank in shown} for shown in shared for group in groups]
    if not groups or any(len({*shown.values()}) == 1 for shown in shared) or any(len(own) > 1 for own in inside):
        return None
    evidence = {"groups": [list(group) for group in groups]}
    return Verdict(ranks=odd_ranks(step), subject=tuple(differing(step)), evidence=evidence)
