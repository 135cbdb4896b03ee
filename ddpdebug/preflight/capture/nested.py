"""Tensors in whatever holds them: arguments, batches and what models return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 5


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in containers and plain objects (model outputs, distributions), always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif depth <= _DEPTH:
        for item in _items(value):
            yield from tensors(item, depth + 1)


def _items(value: Any) -> Iterable[Any]:
    if value is None or isinstance(value, str | bytes | int | float | torch.Size | nn.Module | type):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    return vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()


def mapped(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return the value with `change` applied to everything in its containers that is no container."""
    if depth > _DEPTH or isinstance(value, torch.Size | str):
        return value
    if isinstance(value, dict):
        items = {key: mapped(item, change, depth + 1) for key, item in value.items()}
        return items if type(value) is dict else _like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change, depth + 1) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change, depth + 1) for item in value)
    if isinstance(value, slice):
        return slice(*(mapped(item, change, depth + 1) for item in (value.start, value.stop, value.step)))
    return change(value)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except Exception:  # noqa: BLE001 - a class of its own, whose constructor takes something else
        return items


def cloned(value: Any) -> Any:
    """Return a value whose tensors are copies without a graph; leaves that ask for a gradient do so again."""
    return mapped(value, lambda item: copy_of(item) if isinstance(item, Tensor) else item)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy without a graph; a leaf that asks for a gradient does so again."""
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)
