"""Looking at objects of the user's without a call of theirs: no `__class__`, `__getattr__`, `__len__` or property runs.

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
    tables = [type.__getattribute__(base, "__dict__") for base in bases_of(kind)]
    return next(iter([table[name] for table in tables if name in table]), None)


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and those that it inherits from; a metaclass is not asked."""
    found: tuple[type, ...] = type.__getattribute__(kind, "__mro__")
    return found


def is_one_of(value: Any, kinds: Iterable[type]) -> bool:
    """Return whether a value's type is one of some: a set would call the `__hash__` of a metaclass."""
    return any([type(value) is kind for kind in kinds])


def is_sized(value: Any) -> bool:
    """Return whether the length of a value is known to its type: a builtin one, or an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return is_one_of(value, _SIZED) or (numpy is not None and is_one_of(value, (numpy.ndarray, numpy.memmap)))
