"""The modules that a check examines in a large model: a bounded number, in turn, by the number of checks.

All ranks check the same steps, so they look at the same modules.

What is not finite goes on from a module to the block around it and to the model's output. So the blocks are looked at
first, then the modules inside of those that were bad, then others, a part of the model that each check moves on. Of the
step that shows it the module is found by the replay, or by a later look.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from ddpdebug import torch_internals as internals

#: Modules that one check looks at, the blocks among them, and those that are suspected.
MAX_LOOKS, _MAX_BLOCKS, _MAX_SUSPECTS = 256, 96, 96
#: Checks after which a model's modules are listed anew.
_REFRESH = 16


class Turns:
    """The modules of one model, held weakly."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)
        self._step, self._checks = -1, -1
        self.names: dict[int, str] = {}  # by the number of a module; of those that live
        self._blocks: Sequence[weakref.ref[torch.nn.Module]] = ()
        self._leaves: Sequence[weakref.ref[torch.nn.Module]] = ()
        self._suspects: Sequence[weakref.ref[torch.nn.Module]] = ()
        self._list(root)

    def is_of(self, root: torch.nn.Module) -> bool:
        """Return whether these are the modules of `root`."""
        return self._root() is root

    @property
    def needed(self) -> bool:
        """Whether there are more modules than a check examines."""
        return len(self._blocks) + len(self._leaves) > MAX_LOOKS

    def now(self, step: int) -> list[torch.nn.Module]:
        """Return the modules that the check of a step examines."""
        root = self._root()
        if root is None:
            return []
        if step != self._step:  # another forward of the same step looks at the same
            self._step, self._checks = step, self._checks + 1
            if self._checks % _REFRESH == _REFRESH - 1:
                self._list(root)
        chosen = [*_part(self._blocks, _MAX_BLOCKS, self._checks), *self._suspects]
        chosen += _part(self._leaves, MAX_LOOKS - len(chosen) - 1, self._checks)
        return [root, *_living(chosen)]

    def layers(self, number: int) -> list[torch.nn.Module]:
        """Return modules without children that represent all layers, from the first to the last: always the same."""
        count = min(number, len(self._leaves))
        last = len(self._leaves) - 1
        return _living([self._leaves[i * last // max(1, count - 1)] for i in range(count)])

    def suspect(self, modules: Iterable[torch.nn.Module]) -> None:
        """Examine the parts of these modules next."""
        inside = [part for module in modules if self._root() is not module for part in internals.modules(module)]
        self._suspects = [weakref.ref(part) for part in inside[:_MAX_SUSPECTS]]

    def _list(self, root: torch.nn.Module) -> None:
        named = list(internals.named_modules(root))
        self.names = {id(part): name for name, part in named}
        parts = [part for _, part in named]
        self._blocks = [weakref.ref(part) for part in parts[1:] if not internals.is_leaf(part)]
        self._leaves = [weakref.ref(part) for part in parts[1:] if internals.is_leaf(part)]


def _part(
    modules: Sequence[weakref.ref[torch.nn.Module]], number: int, turn: int
) -> Sequence[weakref.ref[torch.nn.Module]]:
    """Return so many modules in a row, those after the ones of the turn before."""
    if len(modules) <= number:
        return modules
    start = turn * number % len(modules)
    return [*modules[start : start + number], *modules[: max(0, start + number - len(modules))]]


def _living(refs: Iterable[weakref.ref[torch.nn.Module]]) -> list[torch.nn.Module]:
    return [module for ref in refs if (module := ref()) is not None]
