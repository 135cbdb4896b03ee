"""The calls that belong to the followed training: those of one thread, and of autograd's threads for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.step_state import StepState


class Followed:
    """Decides for a call whether it is observed; training in other threads is left alone."""

    def __init__(self, state: StepState, guard: Guard) -> None:
        self._state, self._guard, self._threads = state, guard, entries_of(guard).threads

    def here(self, *_: Any, **__: Any) -> bool:
        """Return whether this is the followed thread."""
        return self._threads.is_here()

    def forward(self, ddp: DistributedDataParallel, /, *_: Any, **__: Any) -> bool:
        """Return whether a DDP's forward runs in the followed thread."""
        if not torch.is_grad_enabled():
            return self._threads.is_here()
        wrapper = self._state.wrapper_of(ddp)
        if self._threads.begins(0 if wrapper is None else wrapper.index):
            return True
        if wrapper is not None:
            wrapper.elsewhere = True
        return False

    def backward(self, *_: Any, **__: Any) -> bool:
        """Return whether a backward runs in the followed thread."""
        return self._threads.begins() or (bool(self._state.in_backward) and self._threads.is_autograd())

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps in the followed thread, or inside its backward.

        Where another thread steps what is followed here, nothing can be told from its gradients any more.
        """
        if (self._state.in_backward and self._threads.is_autograd()) or self._threads.begins():
            return True
        stepped = set(map(id, internals.params(optimizer)))
        for watch in self._state.watches:
            if not watch.given_up and not stepped.isdisjoint(map(id, watch.params)):
                watch.given_up = True
                what = (
                    f"parameters of optimizer {watch.index} are stepped by several threads: it is no longer looked at"
                )
                self._guard.tell("threads", what)
        return False

    def fills_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step is none of training: `get_optimizer_state_dict` makes one, at a rate of 0."""
        since = self._state.since
        if since.micro_batches or self._state.in_backward or internals.state(optimizer):
            return False
        rates = [group.get("lr") for group in internals.groups(optimizer)]
        return bool(rates) and all([_is_zero(rate) for rate in rates])


def _is_zero(rate: Any) -> bool:
    if is_a(rate, torch.Tensor):
        return rate.device.type == "cpu" and rate.numel() == 1 and rate.item() == 0
    return type(rate) in {float, int} and rate == 0
