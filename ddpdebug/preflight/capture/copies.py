"""Copies of the caller's model, optimizer and data loader for the checks, and descriptions of optimizers."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.isolation.user_code import is_users

#: The calls of a user's schedule that are looked at for its highest rate: all at first, then 5 % apart.
_PLACES = (*range(200), *(int(200 * 1.05**i) for i in range(180)))
#: Makes an optimizer of the script's kind and settings, without state, for a copy of the model.
OptimizerFor = Callable[[torch.nn.Module], torch.optim.Optimizer]


class _LocalBatchNorm(nn.BatchNorm1d):
    """Batch norm in place of SyncBatchNorm, which would wait for the other ranks."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the parent's name
        """Take any shape."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and `torch.compile`."""
    while True:
        inner = internals.unwrap_compiled(module)
        if isinstance(inner, DistributedDataParallel | DataParallel):
            inner = inner.module
        if inner is module:
            return module
        module = inner


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model without gradients and without communication."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses what has a graph
    functions = [(f, _rebuilt(f)) for module in model.modules() for f in _functions(vars(module))]
    memo |= {id(function): own for function, own in functions}
    twin = copy.deepcopy(model, memo)
    for function, own in functions:
        _bind(own, function, memo)
    for parameter in twin.parameters():
        parameter.grad = None
    for module in twin.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]  # the same state, computed alone
    return twin


def _functions(attributes: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """Yield the functions in attributes, and in containers there (hooks), that hold on to objects of their own."""
    for value in attributes.values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (f for f in inside if isinstance(f, types.FunctionType) and (f.__closure__ or f.__defaults__))


def _rebuilt(function: types.FunctionType) -> types.FunctionType:
    """Return the same function with cells of its own, which are still empty."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    own.__dict__.update(function.__dict__)
    return own


def _bind(own: types.FunctionType, function: types.FunctionType, memo: Mapping[int, Any]) -> None:
    """Let a function reach the copies of what the one it was made from reaches: deepcopy leaves functions alone."""
    for cell, original in zip(own.__closure__ or (), function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing was assigned yet
            cell.cell_contents = memo.get(id(original.cell_contents), original.cell_contents)
    own.__defaults__ = tuple(memo.get(id(value), value) for value in function.__defaults__ or ()) or None
    own.__kwdefaults__ = {key: memo.get(id(value), value) for key, value in (function.__kwdefaults__ or {}).items()}


def optimizer_maker(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> OptimizerFor | None:
    """Return a function that makes an optimizer of the same kind and settings for a copy of the model.

    Args:
        optimizer: the caller's.
        names: of the parameters, by the identity of the caller's.
    """
    kind: Any = type(getattr(optimizer, "optim", optimizer) if internals.is_sharded(optimizer) else optimizer)
    peaks = peak_rates(optimizer)
    groups = [_settings(group, names) for group in optimizer.param_groups]
    groups = [group if rate is None else {**group, "lr": rate} for group, rate in zip(groups, peaks, strict=True)]
    if not any(group["params"] for group in groups):
        return None
    taken = inspect.signature(kind).parameters
    keywords = {key: value for key, value in dict(optimizer.defaults).items() if key in taken and key != "params"}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        known = dict(model.named_parameters(remove_duplicate=False))
        own = [{**g, "params": [known[name] for name in g["params"] if name in known]} for g in groups]
        single = len(own) == 1
        made: torch.optim.Optimizer = kind(own[0]["params"] if single else own, **keywords)
        for group, settings in zip(made.param_groups, own, strict=True):
            group.update(settings)
        return made

    return make


def _settings(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """Return a group with names for its parameters."""
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    return {**settings, "params": [names[id(p)] for p in group["params"] if id(p) in names]}


def peak_rates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """Return the highest learning rate of each group that a scheduler of torch gives; None without one."""
    peaks = [_number(group.get("max_lr", group.get("initial_lr"))) for group in optimizer.param_groups]
    own = [s for s in gc.get_objects() if issubclass(type(s), LambdaLR) and getattr(s, "optimizer", None) is optimizer]
    for schedule in own:
        try:
            with kept_random_state():
                highest = [
                    base * max(map(f, _PLACES)) for base, f in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
                ]
        except Exception as error:  # a function that knows no such call
            if is_users(error):
                raise
            continue
        peaks = [_number(rate) for rate in highest] if len(highest) == len(peaks) else peaks
    return peaks


def loader_restorer(loader: Any) -> Callable[[], None]:
    """Return a function that restores the generators of a loader to their present state."""
    holders = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    holders.append(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in found.values()]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def loader_twin(loader: Any) -> Any:
    """Return a loader over the same data with generators and workers of its own, so that it may be iterated."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    twins: dict[int, Any] = {}
    twin = copy.copy(loader)
    own = {name: _with_own_generator(getattr(loader, name, None), twins) for name in ("sampler", "batch_sampler")}
    vars(twin).update(own, generator=_own_generator(loader.generator, twins), persistent_workers=False)
    return twin


def _with_own_generator(holder: Any, twins: dict[int, Any]) -> Any:
    """Return a copy of a sampler, and of the sampler in it, that draws from a generator of its own."""
    if holder is None or not hasattr(holder, "__dict__"):
        return holder
    if id(holder) not in twins:
        twins[id(holder)] = twin = copy.copy(holder)
        for name, value in vars(holder).items():
            if isinstance(value, torch.Generator):
                vars(twin)[name] = _own_generator(value, twins)
            elif isinstance(value, torch.utils.data.Sampler):
                vars(twin)[name] = _with_own_generator(value, twins)
    return twins[id(holder)]


def _own_generator(generator: torch.Generator | None, twins: dict[int, Any]) -> Any:
    if generator is None:
        return None
    if id(generator) not in twins:
        twins[id(generator)] = torch.Generator(generator.device).set_state(generator.get_state())
    return twins[id(generator)]


def holdings(
    optimizers: Sequence[tuple[torch.optim.Optimizer, bool]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Describe optimizers as JSON values: their groups, parameters by name, and whether they have stepped.

    Args:
        optimizers: each with whether it has stepped.
        names: of the models' parameters, by identity.
    """
    return [
        {
            "stepped": stepped,
            "groups": [_group(group, names) for group in optimizer.param_groups],
        }
        for optimizer, stepped in optimizers
    ]


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    foreign = [p for p in group["params"] if id(p) not in names]
    return {
        "lr": _number(group.get("lr")),
        "weight_decay": _number(group.get("weight_decay")),
        "names": [names[id(p)] for p in group["params"] if id(p) in names],
        # parameters of no model that was called: with a gradient the script uses them in another way
        "foreign": [list(p.shape) for p in foreign if p.grad is None],
    }


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
