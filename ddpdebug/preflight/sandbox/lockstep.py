"""Keeps the ranks of a job in step while all of them run the same experiment on the job's own DDP model.

Besides DDP's own collectives there is one small all_reduce when an experiment begins and one after each optimizer step,
on DDP's process group and in the training thread, where all ranks come to it in the same order. It is called by the
user in all ranks, as a training step is; one that does not come leaves the others waiting, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.errors import UsageError


class Ranks:
    """The ranks of an experiment: those of the model's DDP, or this process alone.

    Args:
        model: as the caller has it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parallel = isinstance(model, DistributedDataParallel)
        self._group: Any = getattr(model, "process_group", None) if parallel else None
        self.count: int = dist.get_world_size(self._group) if parallel else 1
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def same(self, settings: Sequence[float], names: Sequence[str]) -> None:
        """Check that all ranks pass the same settings.

        Raises:
            ddpdebug.UsageError: they do not; on all ranks.
        """
        if self.count == 1:
            return
        ends = self._reduced([*settings, *(-value for value in settings)], dist.ReduceOp.MAX)
        high, low = ends[: len(settings)], [-value for value in ends[len(settings) :]]
        wrong = [f"{n} ({a} to {b})" for n, a, b in zip(names, low, high, strict=True) if a != b]
        if wrong:
            raise UsageError(f"the ranks differ in {', '.join(wrong)}: call it with the same arguments on every rank")

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means over the ranks, the same numbers on each; NaN where any rank has NaN."""
        if self.count == 1:
            return list(values)
        return [value / self.count for value in self._reduced(values, dist.ReduceOp.SUM)]

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=how, group=self._group)
        return [float(value) for value in tensor.tolist()]
