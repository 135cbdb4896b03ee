"""Access to user objects without calling them: no `__class__`, `__getattr__`, `__len__` or property runs.

`isinstance` asks an object for its `__class__`, which proxies and lazy objects answer by code of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, TypeVar, overload

Kind = TypeVar("Kind")

_NOTHING: Mapping[str, Any] = {}
_SIZED = (list, tuple, range, dict, set, frozenset, str, bytes, bytearray)


@overload
def is_a(value: Any, kind: type[Kind]) -> TypeGuard[Kind]: ...


@overload
def is_a(value: Any, kind: Any) -> bool: ...


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is an instance of a class, or of one of several, by its type."""
    return issubclass(type(value), kind)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes in an object's own dictionary; empty if it has none."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NOTHING
    return table if type(table) is dict else _NOTHING


def of_class(kind: type, name: str) -> Any:
    """Return the entry that a class has under a name, without binding it; None if there is none."""
    tables = [type.__getattribute__(base, "__dict__") for base in bases_of(kind)]
    return next(iter([table[name] for table in tables if name in table]), None)


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its base classes; a metaclass is not called."""
    found: tuple[type, ...] = type.__getattribute__(kind, "__mro__")
    return found


def is_one_of(value: Any, kinds: Iterable[type]) -> bool:
    """Return whether a value's type is one of the given ones: a set would call the `__hash__` of a metaclass."""
    return any([type(value) is kind for kind in kinds])


def is_sized(value: Any) -> bool:
    """Return whether a value's type gives its length without user code: a builtin type, or an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return is_one_of(value, _SIZED) or (numpy is not None and is_one_of(value, (numpy.ndarray, numpy.memmap)))
