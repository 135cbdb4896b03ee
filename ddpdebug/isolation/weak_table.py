"""Values for user objects, found by identity: a `WeakKeyDictionary` would call their `__hash__` and `__eq__`."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
_Entry = tuple[weakref.ref[Any], Value]


class WeakTable(Generic[Value]):
    """A table from objects to values that holds each entry for as long as its object lives.

    No code in Python runs as one of them dies: an exception of a signal handler's would be lost there.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[Value]] = {}

    def __setitem__(self, thing: Any, value: Value) -> None:
        """Keep a value for an object."""
        gone = partial(self._entries.pop, id(thing))  # called with the reference, which is `pop`'s default
        self._entries[id(thing)] = weakref.ref(thing, gone), value

    def __contains__(self, thing: Any) -> bool:
        """Return whether there is a value for an object."""
        return id(thing) in self._entries

    def get(self, thing: Any) -> Value | None:
        """Return the value of an object; None if it has none."""
        found = self._entries.get(id(thing))
        return None if found is None else found[1]

    def pop(self, thing: Any) -> Value | None:
        """Remove an object and return its value; None if it has none."""
        found = self._entries.pop(id(thing), None)
        return None if found is None else found[1]

    def values(self) -> list[Value]:
        """Return the values of all living objects."""
        return [value for _, value in list(self._entries.values())]

    def things(self) -> list[Any]:
        """Return all living objects."""
        return [thing for ref, _ in list(self._entries.values()) if (thing := ref()) is not None]
