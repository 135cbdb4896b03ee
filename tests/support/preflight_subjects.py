"""What the tests of the preflight examine, built by hand; and what must be as it was afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn

from ddpdebug.preflight.subject import Subject

CLASSES, WIDTH = 5, 12


def batches(count: int = 6, size: int = 32, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches whose labels a linear map of the inputs gives."""
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randn(WIDTH, CLASSES, generator=generator)
    inputs = [torch.randn(size, WIDTH, generator=generator) for _ in range(count)]
    return [(x, (x @ answer).argmax(1)) for x in inputs]


def network(*middle: nn.Module, seed: int = 0) -> nn.Module:
    """Return a small network, always the same, without drawing from the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 16), *(middle or (nn.ReLU(),)), nn.Linear(16, CLASSES))


def cross_entropy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]), out


def sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr)


def subject(model: nn.Module | None = None, **changes: Any) -> Subject:
    """Return a healthy subject with the changes."""
    given: dict[str, Any] = {
        "model": model or network(),
        "loss_of": cross_entropy,
        "optimizer_for": sgd(0.05),
        "batches": batches(),
    }
    return Subject(**(given | changes))


def state_of(*things: Any) -> dict[str, Any]:
    """Return what a check might change, as values that can be compared: tensors, modes, random states."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state()),  # noqa: NPY002 - the global generator
        "torch": _bytes(torch.get_rng_state()),
        "grad mode": torch.is_grad_enabled(),
    }
    for i, thing in enumerate(things):
        found |= {f"{i}.{name}": value for name, value in _state(thing)}
    return found


def _state(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, Subject):
        everything = (thing.model, *thing.batches, *thing.val_batches)
        return [(f"{i}.{name}", value) for i, part in enumerate(everything) for name, value in _state(part)]
    if isinstance(thing, nn.Module):
        tensors = {**dict(thing.named_parameters()), **dict(thing.named_buffers())}
        found = [(name, _described(tensor)) for name, tensor in tensors.items()]
        found += [(f"{name}.grad", None if t.grad is None else _described(t.grad)) for name, t in tensors.items()]
        plain = [{k: v for k, v in vars(m).items() if isinstance(v, bool | int | float)} for m in thing.modules()]
        return [*found, ("attributes", plain)]
    if isinstance(thing, torch.optim.Optimizer):
        groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in thing.param_groups]
        states = [(id(p), {k: _described(v) for k, v in state.items()}) for p, state in thing.state.items()]
        return [("groups", groups), ("state", states), ("attributes", sorted(vars(thing)))]
    if isinstance(thing, torch.Tensor):
        return [("", _described(thing))]
    if isinstance(thing, tuple | list):
        return [(f"{i}.{name}", value) for i, part in enumerate(thing) for name, value in _state(part)]
    return [("", repr(thing))]


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return (id(value), tuple(value.shape), value.requires_grad, _bytes(value))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()
