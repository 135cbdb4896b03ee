"""Fault injection: breaks a sound training on one rank in one step, to test that a check finds it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.errors import did_you_mean

#: What a fault does, by its name.
KINDS: Mapping[str, str] = {
    "bit-flip": "one bit of a parameter flips right after the step",
    "skipped-all-reduce": "the rank's gradients of this step stay its own",
    "lr": "the learning rate is ten times as large from this step on",
    "nan": "the rank's own gradient gets a NaN before it is reduced",
    "same-data": "the rank's forward gets the inputs of rank 0 from this step on",
}
_LR_FACTOR = 10.0
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fault:
    """A fault of one `kind` on one rank in one optimizer step. All ranks install it; the others only count steps.

    Args:
        kind: one of `KINDS`.
        rank: where it happens.
        step: when, in steps of the optimizer, from 0.
        parameter: the name of the parameter that is hit (of the module inside DDP); the first by default.

    Raises:
        ValueError: the kind, the rank or the step is none; from `into` also for a rank or parameter that is absent.
    """

    def __init__(self, kind: str, *, rank: int, step: int = 0, parameter: str | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of fault {kind!r}; {did_you_mean(kind, KINDS)}")
        if rank < 0 or step < 0:
            raise ValueError(f"rank and step count from 0, but rank={rank} and step={step}")
        self.kind, self.rank, self.step, self.parameter = kind, rank, step, parameter
        self.happened = False
        self._taken = 0
        self._local: dict[Tensor, Tensor] = {}
        self._handles: list[Any] = []

    def into(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Self:
        """Install the fault; `remove` uninstalls it."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.rank >= world:
            raise ValueError(f"a fault on rank {self.rank} cannot happen in a world of {world}")
        module = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self.parameter is not None and self.parameter not in parameters:
            raise ValueError(f"no parameter {self.parameter!r}; {did_you_mean(self.parameter, parameters)}")
        target = parameters[self.parameter or next(iter(parameters))]
        keep = self._handles.append
        keep(optimizer.register_step_post_hook(lambda *_: self._stepped(target)))
        if self.kind == "same-data":
            keep(model.register_forward_pre_hook(self._share_inputs, with_kwargs=True))
        if not self._is_here(world):
            return self
        if self.kind == "nan":
            keep(target.register_hook(self._spoil))
        elif self.kind == "skipped-all-reduce":
            for parameter in parameters.values():
                keep(parameter.register_post_accumulate_grad_hook(self._keep_gradient))
            keep(_Before(optimizer, self._restore_gradients))
        elif self.kind == "lr":
            keep(optimizer.register_step_pre_hook(lambda given, *_: self._raise_lr(given)))
        return self

    def remove(self) -> None:
        """Remove the hooks; damage already done stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._local.clear()

    def _is_here(self, world: int) -> bool:
        return self.rank == (dist.get_rank() if world > 1 else 0)

    def _due(self) -> bool:
        return self._taken == self.step

    def _stepped(self, target: Tensor) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.kind == "bit-flip" and self._due() and self._is_here(world):
            _flip_bit(target)
            self.happened = True
        self._taken += 1

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        if not self._due():
            return None
        self.happened = True
        return _with_nan(gradient)

    def _keep_gradient(self, parameter: Tensor) -> None:
        if self._due() and parameter.grad is not None:
            self._local[parameter] = parameter.grad.detach().clone()

    def _restore_gradients(self) -> None:
        if self._due():
            for parameter, gradient in self._local.items():
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
            self.happened = bool(self._local)
            self._local.clear()

    def _raise_lr(self, optimizer: torch.optim.Optimizer) -> None:
        if self._due():
            _raise_rate(optimizer, _LR_FACTOR)
            self.happened = True

    def _share_inputs(self, _: object, args: Any, kwargs: Any) -> Any:
        """Broadcast rank 0's inputs over the job's own group; all ranks are here in the same step."""
        if self._taken < self.step or not dist.is_initialized():
            return None
        shared = [(args, kwargs)]
        dist.broadcast_object_list(shared, src=0)
        if dist.get_rank() != self.rank:
            return None
        self.happened = True
        return shared[0]


class _Before:
    """Runs something before a step and before all its hooks, which then see what they would see in a real fault."""

    def __init__(self, optimizer: torch.optim.Optimizer, action: Callable[[], None]) -> None:
        self._optimizer, step = optimizer, optimizer.step

        @functools.wraps(step)
        def after_action(*args: Any, **kwargs: Any) -> Any:
            action()
            return step(*args, **kwargs)

        vars(optimizer)["step"] = after_action

    def remove(self) -> None:
        """Let the optimizer step as its class does."""
        vars(self._optimizer).pop("step", None)


def _flip_bit(parameter: torch.Tensor) -> None:
    """Flip a bit of the first element: high in the mantissa, so that the value stays finite."""
    with torch.no_grad():
        place = (0,) * parameter.dim()
        number = parameter[place].clone().reshape(1)
        bits = number.view(_INTEGERS[number.element_size()])
        mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}.get(number.dtype, 1)
        bits ^= 1 << (mantissa - 1)
        parameter[place] = bits.view(number.dtype)[0]


def _with_nan(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first element is NaN."""
    changed = gradient.clone()
    changed[(0,) * changed.dim()] = float("nan")
    return changed


def _raise_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
