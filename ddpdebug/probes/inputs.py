"""The arguments of the model's forward: non-finite ones, by name and sample."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import named_tensors
from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.schema.details import BadInput

_FUNCTIONS = FunctionType, MethodType
_MAX_TENSORS = 64
#: Arguments with one of these words in their name are masks, which hold -Inf on purpose.
_MASKS = ("mask", "bias")


def named(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among a forward's arguments with the names from its signature."""
    forward = module.forward
    if type(forward) not in _FUNCTIONS:  # to inspect an object of the user's is to call its methods
        forward = _anything
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if is_users(error):
            raise
        values: list[tuple[str, Any]] = [(f"args[{i}]", value) for i, value in enumerate(args)]
        values += list(kwargs.items())
    else:
        kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
        values = []
        for name, value in bound.arguments.items():
            if kinds[name] is inspect.Parameter.VAR_KEYWORD:
                values += list(value.items())
            else:
                values.append((name, value))
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in values:
        found += named_tensors(name, value, _MAX_TENSORS - len(found))
        if len(found) >= _MAX_TENSORS:
            break
    return found


def _anything(*args: Any, **kwargs: Any) -> None:
    """Stand in for what has no signature."""


def bad(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> list[BadInput]:
    """Return the non-finite CPU arguments that are no masks, with their non-finite samples."""
    found = []
    for name, tensor in named(module, args, kwargs):
        if tensor.device.type != "cpu" or not internals.is_plain(tensor) or not internals.is_readable_memory(tensor):
            continue
        if (seen := ranges.read(tensor)) is None or all(map(math.isfinite, seen)):
            continue
        if ranges.kinds_of(*seen) == [ranges.MINUS_INF] and (_is_mask(name) or ranges.is_additive_mask(tensor)):
            continue
        about = {key: value for key, value in ranges.describe(tensor).items() if key != "range"}
        found.append(BadInput(argument=name, **about, samples=(*ranges.samples(tensor),)))
    return found


def bad_later(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Examine the arguments on a device; return a function that finds the non-finite ones later, or None."""
    looked = [(name, t, ranges.look(t)) for name, t in named(module, args, kwargs) if t.device.type != "cpu"]
    looked = [(name, t, seen) for name, t, seen in looked if seen is not None]
    if not looked:
        return None
    known = [BadInput(argument=n, dtype=ranges.dtype_name(t), shape=tuple(t.shape)) for n, t, _ in looked]
    numbers = device.numbers([number for _, _, seen in looked if seen is not None for number in seen])

    def read() -> list[BadInput]:
        values = numbers()
        found = []
        for about, low, high in zip(known, values[::2], values[1::2], strict=True):
            kinds = ranges.kinds_of(low, high)
            if kinds and not (kinds == [ranges.MINUS_INF] and (_is_mask(about.argument) or high == 0)):
                found.append(replace(about, kinds=tuple(kinds)))
        return found

    return read


def _is_mask(name: str) -> bool:
    return any([word in name.lower() for word in _MASKS])
