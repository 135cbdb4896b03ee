"""Classes that are known by name, so that nobody must import them."""

from __future__ import annotations

from collections.abc import Iterable


def inherits(kind: type, names: Iterable[str]) -> bool:
    """Tell whether a class or one of its bases has one of the names."""
    wanted = set(names)
    return any(base.__name__ in wanted for base in kind.__mro__)
