"""Tables of modules and optimizers, read without calling methods, which may be user code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpdebug.torch_internals import names


def named_modules(
    root: torch.nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the same as `Module.named_modules`, in the same order."""
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


def own_attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute from an object's own table or its class, without calling a user's `__getattr__`."""
    own = _dictionary(owner)
    if name in own:
        return own[name]
    for kind in type.__getattribute__(type(owner), "__mro__"):  # a metaclass is not asked either
        if name in vars(kind):
            return vars(kind)[name]
    return default


def in_train_mode(module: torch.nn.Module) -> bool:
    """Return whether a module is in train mode, without calling a user's `__getattribute__`."""
    own = own_attribute(module, "training")
    return bool(module.training if own is None else own)  # a `ScriptModule` has it elsewhere


def _dictionary(owner: object) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:  # no Python object inside, or one with slots
        return {}
    return found


def own_child(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """Return the child of a module registered under a name; None if there is none."""
    table = _table(module, names.MODULES)  # that of a `ScriptModule` is no dictionary
    found: torch.nn.Module | None = table[name] if name in table else None  # noqa: SIM401 - it cannot be asked otherwise
    return found


def hooks(module: torch.nn.Module) -> list[list[Any]]:
    """Return what is registered on a module: of its forward, before it, of its backward; of its parameters' gradients.

    Without the empty lists.
    """
    own = _dictionary(module)
    # a subclass of parameters may have code of its own
    plain = [p for p in _table(module, names.PARAMETERS).values() if type(p) is torch.nn.Parameter]
    tables = [own.get(name) for name in names.MODULE_HOOKS] + [getattr(p, names.TENSOR_HOOKS, None) for p in plain]
    return [list(table.values()) for table in tables if table]


def groups(optimizer: object) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups; instances of a user's dict class as plain dictionaries."""
    found = _held(optimizer, "param_groups", _are_groups)
    return [dict(dict.items(g)) if type(g) is not dict and issubclass(type(g), dict) else g for g in found or ()]


def params(optimizer: object) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [parameter for group in groups(optimizer) for parameter in group["params"]]


def state(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's table of state by parameter."""
    found = _held(optimizer, "state", _is_state)
    return {} if found is None else found


def _held(optimizer: object, name: str, fits: Callable[[Any], bool]) -> Any:
    """Return what an optimizer has under a name, or None.

    Where its class has a property of that name, which is not read, this is what fits among all that it holds, or that
    an optimizer in it does.
    """
    waiting = [optimizer]
    for holder in waiting:
        own = _dictionary(holder)
        if own.get(name) is not None:
            return own[name]
        for value in list(own.values()):
            if fits(value):
                return value
            inner = issubclass(type(value), torch.optim.Optimizer)
            if inner and not any([value is known for known in waiting]):
                waiting.append(value)
    return None


def _are_groups(value: Any) -> bool:
    return type(value) is list and bool(value) and all([type(g) is dict and "params" in g for g in value])


def _is_state(value: Any) -> bool:
    if not ((type(value) is dict or type(value) is defaultdict) and value):
        return False
    keyed = all([issubclass(type(key), torch.Tensor) for key in list(value)])
    return keyed and all([type(own) is dict for own in list(value.values())])


def modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the same as `Module.modules`."""
    return (module for _, module in named_modules(root))


def children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the same as `Module.children`."""
    seen: set[int] = set()
    for child in _table(module, names.MODULES).values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield child


def named_parameters(
    root: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the same as `Module.named_parameters`."""
    return _members(root, names.PARAMETERS, remove_duplicate=remove_duplicate)


def parameters(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the same as `Module.parameters`."""
    return (parameter for _, parameter in named_parameters(root))


def first_parameter(root: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the first of a module's parameters; None if it has none. Walks no further."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        for parameter in _table(module, names.PARAMETERS).values():
            if parameter is not None:
                return parameter  # type: ignore[no-any-return]  # what the table has
        waiting += [child for child in reversed(_table(module, names.MODULES).values()) if child is not None]
    return None


def named_buffers(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same as `Module.named_buffers`."""
    return _members(root, names.BUFFERS, remove_duplicate=True)


def buffers(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the same as `Module.buffers`."""
    return (buffer for _, buffer in named_buffers(root))


def _members(root: torch.nn.Module, table: str, *, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in named_modules(root, remove_duplicate=remove_duplicate):
        for name, tensor in _table(module, table).items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield (f"{path}.{name}" if path else name), tensor
