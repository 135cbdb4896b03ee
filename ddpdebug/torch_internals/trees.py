"""The tables of a module tree, read without calling its methods: `named_parameters` and its like may be the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddpdebug.torch_internals import names


def named_modules(
    root: torch.nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield what `Module.named_modules` does, in its order."""
    seen: set[int] = set()
    waiting = [(prefix, root)]
    while waiting:  # no recursion of generators: each level would pass on every module below it
        path, module = waiting.pop()
        if remove_duplicate:
            if id(module) in seen:
                continue
            seen.add(id(module))
        yield path, module
        start = f"{path}." if path else ""
        # read when the walk goes on, as `Module.named_modules` does
        waiting += [(start + name, c) for name, c in reversed(_table(module, names.MODULES).items()) if c is not None]


def _table(module: torch.nn.Module, name: str) -> Any:
    """Return a table of a module; none of one that is still being built, or that is no Python object inside."""
    own = vars(module).get(name)
    return getattr(module, name, {}) if own is None else own


def modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield what `Module.modules` does."""
    return (module for _, module in named_modules(root))


def children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield what `Module.children` does."""
    seen: set[int] = set()
    for child in _table(module, names.MODULES).values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield child


def named_parameters(
    root: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield what `Module.named_parameters` does."""
    return _members(root, names.PARAMETERS, remove_duplicate=remove_duplicate)


def parameters(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield what `Module.parameters` does."""
    return (parameter for _, parameter in named_parameters(root))


def first_parameter(root: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the first of a module's parameters, None where it has none; walks no further."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        for parameter in _table(module, names.PARAMETERS).values():
            if parameter is not None:
                return parameter  # type: ignore[no-any-return]  # what the table has
        waiting += [child for child in reversed(_table(module, names.MODULES).values()) if child is not None]
    return None


def named_buffers(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `Module.named_buffers` does."""
    return _members(root, names.BUFFERS, remove_duplicate=True)


def buffers(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what `Module.buffers` does."""
    return (buffer for _, buffer in named_buffers(root))


def _members(root: torch.nn.Module, table: str, *, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in named_modules(root, remove_duplicate=remove_duplicate):
        for name, tensor in _table(module, table).items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield (f"{path}.{name}" if path else name), tensor
