"""Nested containers: their tensors, their items with paths, and copies of containers with other values.

No code of a container's class runs, which may count, fetch or raise and is meant for the job; but for `mapped` with
`kinds`, which makes containers of any class anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.isolation.user_code import is_users

#: Levels of containers in which tensors are looked for, paths are written, and values are replaced.
_TENSORS, _PATHS, _MAPPED = 5, 8, 20
#: Items of containers that are looked at in one value.
ITEMS = 4096
_KEYS = {str, int, bool, float, bytes, type(None)}
_PLAIN = frozenset(_KEYS)


def parts_of(value: Any) -> Sequence[tuple[str, Any]] | None:
    """Return the items of a container, each with its place as written in code; None if the value is no container.

    Containers are dicts, lists, tuples, what inherits from them, dataclasses and model outputs. Of one the first
    `ITEMS` are returned.
    """
    kind = type(value)
    if issubclass(kind, dict):
        if "__dataclass_fields__" in _own(kind):  # a model output: its fields, those that are None left out
            return [(f".{name}", item) for name, item in _fields(kind, value) if item is not None]
        pairs = islice(dict.items(value), ITEMS)
        return [(f"[{key!r}]" if type(key) in _KEYS else "[...]", item) for key, item in pairs]
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        items = enumerate(islice(tuple.__iter__(value), ITEMS))
        return [(f".{names[i]}" if names and i < len(names) else f"[{i}]", item) for i, item in items]
    if issubclass(kind, list):
        return [(f"[{i}]", item) for i, item in enumerate(islice(list.__iter__(value), ITEMS))]
    if _declares(kind, "__dataclass_fields__") or _declares(kind, "to_tuple"):
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
    """Return the tensors in a value or in containers, five levels deep, always in the same order.

    Of the items of containers the first `ITEMS` are looked at: texts, numbers and tables of words may be many more.
    """
    if issubclass(type(value), torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _add_tensors(found, value, depth, ITEMS)
    return found


def named_tensors(path: str, value: Any, most: int) -> list[tuple[str, torch.Tensor]]:
    """Return up to `most` tensors in a value, five levels deep, with their places as written in code.

    Of the items of containers the first `ITEMS` are looked at.
    """
    found: list[tuple[str, torch.Tensor]] = []
    _add_named(found, path, value, 0, most, ITEMS)
    return found


def _add_named(found: list[tuple[str, torch.Tensor]], path: str, value: Any, depth: int, most: int, room: int) -> int:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        found.append((path, value))
    elif depth < _TENSORS and kind not in _PLAIN:
        for place, item in parts_of(value) or ():
            if room <= 0 or len(found) >= most:
                break
            room = _add_named(found, path + place, item, depth + 1, most, room - 1)
    return room


def _add_tensors(found: list[torch.Tensor], value: Any, depth: int, room: int) -> int:
    """Add the tensors of a container; return how many items may still be looked at."""
    if depth >= _TENSORS:
        return room
    for item in islice(_values(value), room):
        if room <= 0:
            break
        room -= 1
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            found.append(item)
        elif kind not in _PLAIN:
            room = _add_tensors(found, item, depth + 1, room)
    return room


def _values(value: Any) -> Iterable[Any]:
    """Return the items of a container as `parts_of` has them, without their places; none of what is no container."""
    kind = type(value)
    if issubclass(kind, dict) and "__dataclass_fields__" not in _own(kind):
        return dict.values(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    if issubclass(kind, list):
        return list.__iter__(value)
    return [item for _, item in parts_of(value) or ()]


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
    return kind in {dict, list, tuple} or (issubclass(kind, tuple) and _declares(kind, "_make"))


def items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return keys and items of a plain container."""
    if type(value) is dict:
        return iter(value.items())
    return enumerate(tuple.__iter__(value) if issubclass(type(value), tuple) else list.__iter__(value))


def rebuilt(value: Any, values: list[Any]) -> Any:
    """Return a plain container like `value` with other items."""
    kind = type(value)
    if kind is dict:
        return dict(zip(value, values, strict=True))
    return values if kind is list else tuple.__new__(kind, values)


def _own(kind: type) -> Any:
    """Return the attributes of a class itself; a metaclass is not asked."""
    return type.__getattribute__(kind, "__dict__")


def _declares(kind: type, name: str) -> bool:
    """Return whether a class or a base of it has an attribute; a metaclass's `__getattr__` is not asked."""
    for base in type.__getattribute__(kind, "__mro__"):  # noqa: SIM110 - what a trace function raises is lost in `any`
        if name in _own(base):
            return True
    return False


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
        for key, item in islice(items(value), max(0, ITEMS - len(found))):
            if len(found) < ITEMS:
                _add_leaves(found, f"{path}[{key!r}]", item, depth + 1)
        return
    found.append((path, value))
    if _declares(type(value), "__dataclass_fields__") and depth < _PATHS:
        for key, item in attributes_of(value).items():
            _add_leaves(found, f"{path}.{key}", item, depth + 1)
