"""Looking at objects of the user's without a call of theirs: no `__class__`, `__getattr__`, `__len__` or property runs.

`isinstance` asks an object for its `__class__`, which proxies and lazy objects answer by code of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar, overload

Kind = TypeVar("Kind")

_NOTHING: Mapping[str, Any] = {}
_SIZED = frozenset({list, tuple, range, dict, set, frozenset, str, bytes, bytearray})


@overload
def is_a(value: Any, kind: type[Kind]) -> TypeGuard[Kind]: ...


@overload
def is_a(value: Any, kind: Any) -> bool: ...


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is of a class, or of one of several, by its type."""
    return issubclass(type(value), kind)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes that an object holds itself; none of one without a dictionary."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NOTHING
    return table if type(table) is dict else _NOTHING


def of_class(kind: type, name: str) -> Any:
    """Return what a class has under a name, as it stands there; None where it has not."""
    return next(iter([vars(base)[name] for base in kind.__mro__ if name in vars(base)]), None)


def is_sized(value: Any) -> bool:
    """Return whether the length of a value is known to its type: a builtin one, or an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return type(value) in _SIZED or (numpy is not None and type(value) in {numpy.ndarray, numpy.memmap})
