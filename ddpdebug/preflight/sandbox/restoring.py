"""Restores a training bit for bit and in place, for experiments that need the caller's own DDP model.

Values are copied back into the tensors that were there, so that everybody who holds one of them sees it restored:
parameters, gradients (DDP's may be views of its buckets), buffers, the optimizer's state, settings and counters, the
modes and attributes of modules, GradScaler, and the random state, generators of loaders included.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.nested import tensors_in
from ddpdebug.preflight.capture.copies import loader_restorer, unwrapped

Restore = Callable[[], None]


@contextlib.contextmanager
def restored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None, batches: Any = None
) -> Iterator[None]:
    """Restore the whole training state after the body, also when it raises."""
    with kept_random_state(), torch.no_grad(), contextlib.ExitStack() as stack:
        tensors = {id(t): t for t in _tensors(model, optimizer)}
        stack.callback(_copied_back(tensors.values()))
        stack.callback(_gradients(tensors.values()))
        stack.callback(_optimizer(optimizer))
        for module in unwrapped(model).modules():  # DDP's own counters belong to its reducer, which goes on counting
            stack.callback(_flags(module))
        stack.callback(loader_restorer(batches))
        if scaler is not None:
            stack.callback(scaler.load_state_dict, copy.deepcopy(scaler.state_dict()))
        with torch.enable_grad():
            yield


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
        yield from (value for value in group.values() if isinstance(value, torch.Tensor))
    for state in optimizer.state.values():
        yield from tensors_in(state)


def _copied_back(tensors: Iterable[torch.Tensor]) -> Restore:
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore() -> None:
        for tensor, value in kept:
            tensor.detach().copy_(value)

    return restore


def _gradients(tensors: Iterable[torch.Tensor]) -> Restore:
    kept = [(t, t.grad, None if t.grad is None else t.grad.detach().clone()) for t in tensors if t.is_leaf]
    for tensor, _, _ in kept:
        tensor.grad = None

    def restore() -> None:
        for tensor, gradient, value in kept:
            tensor.grad = gradient
            if gradient is not None and value is not None:
                gradient.detach().copy_(value)

    return restore


def _optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    """Keep everything but the tensors' values: the state's entries, the groups' settings, the object's attributes."""
    own = dict(optimizer.__dict__)
    groups = [
        (group, {key: v if key == "params" else _kept(v) for key, v in group.items()})
        for group in optimizer.param_groups
    ]
    states = [(key, state, {name: _kept(v) for name, v in state.items()}) for key, state in optimizer.state.items()]

    def restore() -> None:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(own)
        for group, values in groups:
            group.clear()
            group.update(values)
        optimizer.state.clear()
        for key, state, values in states:
            state.clear()
            state.update(values)
            optimizer.state[key] = state

    return restore


def _kept(value: Any) -> Any:
    """Keep tensors by reference, their values are kept elsewhere; anything else is copied."""
    if isinstance(value, list):
        return [_kept(item) for item in value]
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _flags(module: torch.nn.Module) -> Restore:
    """Keep a module's plain attributes: its mode, counters, factors."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)}

    def restore() -> None:
        vars(module).update(plain)

    return restore
