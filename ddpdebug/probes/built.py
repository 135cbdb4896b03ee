"""The modules and optimizers of this process: recorded as they are built, or found if they were built before.

Torch calls its public registration hooks for each parameter and child that a module gets, and a module that is copied
or loaded gets its state through `Module.__setstate__`. Nothing is kept alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.ties import Ties

#: Entries of modules that are gone are dropped when the table has grown to so many times what lived last time.
_SWEEP_AT, _LEAST = 2, 1024


class Built:
    """The living modules and optimizers, in the order of their construction."""

    def __init__(self) -> None:
        self.modules_seen = 0  # grows with each new one
        self.ties = Ties()
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._sweep_at = _LEAST

    def has_part(self, module: torch.nn.Module, name: str, part: Any) -> None:
        """Record a module that gets a parameter or a child, and these."""
        self.module(module)
        if isinstance(part, torch.nn.Module):
            self.module(part)
        elif isinstance(part, torch.nn.Parameter):
            self.ties.given(module, name, part)

    def module(self, module: torch.nn.Module, *_: Any) -> None:
        """Record a module."""
        known = self._modules.get(id(module))
        if known is not None and known() is module:
            return
        self._modules.pop(id(module), None)  # the number of one that is gone: the new one comes last
        self._modules[id(module)] = weakref.ref(module)
        self.modules_seen += 1
        if len(self._modules) > self._sweep_at:
            self._modules = {key: ref for key, ref in tuple(self._modules.items()) if ref() is not None}
            self._sweep_at = max(_LEAST, _SWEEP_AT * len(self._modules))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def note(self, thing: Any) -> None:
        """Record a module or an optimizer, by `type`: reading `__class__` of a proxy may run code of the script."""
        kind = type(thing)
        if issubclass(kind, torch.nn.Module):
            self.module(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            self.optimizer(thing)

    def look_around(self) -> None:
        """Record modules and optimizers built before a late attach: a walk over all objects, tens of milliseconds."""
        for thing in gc.get_objects():
            self.note(thing)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The living modules."""
        return [module for ref in tuple(self._modules.values()) if (module := ref()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The living optimizers."""
        return [optimizer for ref in tuple(self._optimizers.values()) if (optimizer := ref()) is not None]

    def outermost(self) -> list[torch.nn.Module]:
        """Return the living modules that are no child of another."""
        modules = self.modules
        children = {id(child) for module in modules for child in internals.children(module)}
        return [module for module in modules if id(module) not in children]

    def roots(self, params: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
        """Return the outermost modules that hold some of the parameters."""
        wanted = {id(p) for p in params}
        return [m for m in self.outermost() if any([id(p) in wanted for p in internals.parameters(m)])]

    def names(self, params: Sequence[torch.Tensor]) -> dict[int, str]:
        """Return the names of parameters without a DDP, in their outermost module, by the parameter's id."""
        wanted = {id(p) for p in params}
        names: dict[int, str] = {}
        for name, held in self._named(params):
            if id(held) in wanted:
                names.setdefault(id(held), name)
        return names

    def _named(self, params: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self.roots(params):
            yield from internals.named_parameters(module)
