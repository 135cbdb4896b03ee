"""SYNC211: the reduction covers fewer ranks than train together."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.sync.gradients import GradientRule, differing, gradient_classes, odd_ranks
from ddpdebug.detectors.sync.sync203_parameter_not_reduced import ParameterNotReduced
from ddpdebug.schema.details import Contract

_HALVES: dict[int, Any] = {2: {"grads_digest": 5}, 3: {"grads_digest": 5}}
_GROUPS: dict[int, Any] = {rank: {"groups": [[0, 1] if rank < 2 else [2, 3]]} for rank in range(4)}
_GRADIENTS = gradients(4, {2: {"w": "ff"}, 3: {"w": "ff"}})


class SmallerGroup(GradientRule):
    """DDP reduces over process groups smaller than the world: ranks agree inside their group, not between groups.

    Impact: every group trains a model of its own on a part of the data, with a smaller batch than intended. Inside
    each group everything looks healthy.

    Diagnosis: the evidence lists the groups. Print `ddp_model.process_group.size()` and
    `torch.distributed.get_world_size()`, and find out which group was passed as `process_group=`.

    Causes:
    - a node-local group (made for loading or broadcasting) passed to DDP as `process_group=`
    - `dist.new_group(ranks)` with ranks computed from the local instead of the global rank
    - a device mesh whose data-parallel dimension is smaller than the world by mistake

    Remedy:
    - leave `process_group` out, or pass a group of all ranks that should train the same model
    - with hybrid schemes reduce over the second dimension too (`dist.all_reduce` between the groups)
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
        groups = sorted({group for told in step.answers(Contract).values() for group in told.groups})
        classes = gradient_classes(step) or {}
        smaller = [list(group) for group in groups if 1 <= len(group) < step.world]
        # of a reduction that works at least the ranks of each group agree
        if not smaller or any(len({classes[rank] for rank in group if rank in classes}) > 1 for group in smaller):
            return None
        return Verdict(ranks=odd_ranks(step), subject=tuple(differing(step)), evidence={"groups": smaller})
