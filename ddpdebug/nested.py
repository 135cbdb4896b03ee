"""Nested containers: their tensors, their items with paths, and copies of containers with other values.

No code of a container's class runs, which may count, fetch or raise and is meant for the job; but for `mapped` with
`kinds`, which makes containers of any class anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.isolation.user_code import is_users

#: Levels of containers in which tensors are looked for, paths are written, and values are replaced.
_TENSORS, _PATHS, _MAPPED = 5, 8, 20
_KEYS = {str, int, bool, float, bytes, type(None)}


def parts_of(value: Any) -> Sequence[tuple[str, Any]] | None:
    """Return the items of a container, each with its place as written in code; None if the value is no container.

    Containers are dicts, lists, tuples, what inherits from them, dataclasses and model outputs.
    """
    kind = type(value)
    if issubclass(kind, dict):
        if "__dataclass_fields__" in vars(kind):  # a model output: its fields, those that are None left out
            return [(f".{name}", item) for name, item in _fields(kind, value) if item is not None]
        return [(f"[{key!r}]" if type(key) in _KEYS else "[...]", item) for key, item in dict.items(value)]
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        items = enumerate(tuple.__iter__(value))
        return [(f".{names[i]}" if names and i < len(names) else f"[{i}]", item) for i, item in items]
    if issubclass(kind, list):
        return [(f"[{i}]", item) for i, item in enumerate(list.__iter__(value))]
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "to_tuple"):
        return [(f".{name}", item) for name, item in _fields(kind, value)]
    return None


def _fields(kind: type, value: Any) -> list[tuple[str, Any]]:
    own = dict(attributes_of(value))
    if not own:  # a dataclass with slots
        for name in getattr(kind, "__dataclass_fields__", ()):
            slot = inspect.getattr_static(kind, name, None)
            if inspect.ismemberdescriptor(slot) and (found := _slot(slot, value)) is not None:
                own[name] = found
    return list(dict.items(own))


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError as error:  # not set
        if is_users(error):
            raise
        return None


def tensors_in(value: Any, depth: int = 0) -> Sequence[torch.Tensor]:
    """Return the tensors in a value or in containers, five levels deep, always in the same order."""
    if issubclass(type(value), torch.Tensor):
        return [value]
    if depth >= _TENSORS:
        return []
    kind = type(value)
    if kind is dict:
        return [t for item in value.values() for t in tensors_in(item, depth + 1)]
    if kind is list or kind is tuple:
        return [t for item in value for t in tensors_in(item, depth + 1)]
    return [t for _, item in parts_of(value) or () for t in tensors_in(item, depth + 1)]


def tensors_in_objects(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, slices and plain objects (a distribution, a user's class), six levels deep."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield value
    elif depth <= _TENSORS and not issubclass(kind, str | bytes | int | float | torch.Size | torch.nn.Module | type):
        parts = parts_of(value)
        if parts is None and issubclass(kind, slice):
            parts = [("", value.start), ("", value.stop), ("", value.step)]
        elif parts is None and not callable(value):
            parts = _fields(kind, value)
        for _, item in parts or ():
            yield from tensors_in_objects(item, depth + 1)


def is_container(value: Any) -> bool:
    """Whether a value is a plain container that can be rebuilt from its items."""
    kind = type(value)
    return kind in {dict, list, tuple} or (is_a(value, tuple) and hasattr(kind, "_make"))


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and items of a plain container."""
    return list(value.items()) if is_a(value, dict) else list(enumerate(value))


def rebuilt(value: Any, values: list[Any]) -> Any:
    """Return a plain container like `value` with other items."""
    if is_a(value, dict):
        return dict(zip(value, values, strict=True))
    make = getattr(type(value), "_make", type(value))
    return make(values)


def mapped(value: Any, change: Callable[[Any], Any], *, kinds: bool = False, depth: int = 0) -> Any:
    """Return a value with `change` applied to every item of its plain containers that is no container.

    Args:
        kinds: go into slices and into what inherits from containers as well, and make the like with its own
            constructor; where that takes something else, a dict is plain then.
    """
    if depth >= _MAPPED:
        return change(value)

    def inner(item: Any) -> Any:
        return mapped(item, change, kinds=kinds, depth=depth + 1)

    if is_container(value):
        return rebuilt(value, [inner(item) for _, item in items(value)])
    if kinds and is_a(value, dict):
        return _like(value, {key: inner(item) for key, item in value.items()})
    if kinds and is_a(value, list | tuple) and not is_a(value, torch.Size):
        return type(value)([inner(item) for item in value])
    if kinds and is_a(value, slice):
        return slice(inner(value.start), inner(value.stop), inner(value.step))
    return change(value)


def _like(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    try:
        return type(value)(items)
    except Exception as error:  # a class of its own, whose constructor takes something else
        if is_users(error):
            raise
        return items


def cloned(value: Any) -> Any:
    """Return a value with its tensors copied without a graph; copies of leaves keep `requires_grad`."""
    return mapped(value, lambda item: copy_of(item) if is_a(item, torch.Tensor) else item, kinds=True)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor without a graph; the copy of a leaf keeps `requires_grad`."""
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return (path, value) of every item of args and kwargs that is no container: `args[0]["mask"]`, `x[1]`.

    A list, and not a generator: what a trace function raises is lost where that is given up halfway.
    """
    args, kwargs = arguments
    found: list[tuple[str, Any]] = []
    for i, value in enumerate(args):
        _add_leaves(found, f"args[{i}]", value, 0)
    for key, value in kwargs.items():
        _add_leaves(found, str(key), value, 0)
    return found


def _add_leaves(found: list[tuple[str, Any]], path: str, value: Any, depth: int) -> None:
    if depth < _PATHS and is_container(value):
        for key, item in items(value):
            _add_leaves(found, f"{path}[{key!r}]", item, depth + 1)
        return
    found.append((path, value))
    if hasattr(type(value), "__dataclass_fields__") and depth < _PATHS:
        for key, item in attributes_of(value).items():
            _add_leaves(found, f"{path}.{key}", item, depth + 1)
