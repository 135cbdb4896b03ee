"""Finds modules that ran without gradients in a forward that trains, although an optimizer means to train them.

The modules of a model's first forward are noted. What ran without gradients alone and gets none in the first steps
although its optimizer holds it is cut off. Activation checkpointing that works, a siamese branch and a part that trains
in every other step do get gradients; frozen parts need none. A part in eval mode, a copy of a part that trains and
weights that somebody writes (averages, target networks) are meant so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import NoGradParameters

#: Optimizer steps, from 0, without a gradient until it is told: more than an accident, and before SYNC207 judges.
JUDGE = 3
_MAX_NAMES = 20


class NoGrad:
    """Looks at the first forward of one model, and at its parameters in the first steps.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module, entries: Entries) -> None:
        self._root = weakref.ref(root)
        self._hook = entries.after_modules("probe:no-grad", self._look)
        self._with: set[int] = set()  # ids of the parameters of modules that ran with gradients
        self._without: set[int] = set()
        self._lines: dict[int, str | None] = {}  # of modules that ran without, by id, in the order of their returns
        self._marks: dict[str, list[tuple[str, weakref.ref[torch.Tensor], int | None]]] = {}  # by the module's path
        self._location: dict[str, str | None] = {}

    def begin(self) -> None:
        """Look at the forward that begins now."""
        if not internals.anything_compiled():
            self._hook.on()

    def release(self) -> None:
        """Take the hook away."""
        self._hook.off()

    def mark(self, lacking: Iterable[torch.Tensor]) -> None:
        """Note which modules that ran without gradients got none in the first step."""
        root = self._root()
        behind = ({id(p) for p in lacking} & self._without) - self._with
        if root is None or not behind:
            return
        for path, module in self._outermost(root, behind):
            if (root.training and not module.training) or _has_copy(root, module, behind):
                continue
            prefix = f"{path}." if path else ""
            self._marks[path] = [
                (prefix + name, weakref.ref(p), internals.version_of(p)) for name, p in _trainable(module)
            ]
            inside = (self._lines[id(part)] for part in internals.modules(module) if id(part) in self._lines)
            self._location[path] = next(inside, None)

    def keep(self) -> None:
        """Forget what has got a gradient since then, was written or was frozen."""
        for path, marks in list(self._marks.items()):
            for _, ref, version in marks:
                p = ref()
                if p is None or p.grad is not None or not p.requires_grad or internals.version_of(p) != version:
                    del self._marks[path]
                    break

    def found(self) -> NoGradParameters | None:
        """Return which modules are left, with their parameters and the line that calls the first."""
        if not self._marks:
            return None
        paths = list(self._marks)
        names = [name for marks in self._marks.values() for name, _, _ in marks]
        location = self._location[paths[0]]
        modules = tuple(path or "the model" for path in paths[:5])
        return NoGradParameters(names=tuple(names[:_MAX_NAMES]), modules=modules, location=location)

    def _outermost(self, root: nn.Module, behind: set[int]) -> Iterator[tuple[str, nn.Module]]:
        """Yield the largest modules all of whose trainable parameters are cut off."""
        taken: set[int] = set()
        for path, module in internals.named_modules(root):
            params = {id(p) for _, p in _trainable(module)}
            if params and params <= behind and not params <= taken:
                taken |= params
                yield path, module

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        own = [id(p) for p in internals.own_parameters(module)]
        if torch.is_grad_enabled():
            self._with.update(own)
            return
        self._without.update(own)
        if id(module) not in self._lines:
            self._lines[id(module)] = user_location()


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in internals.named_parameters(module) if p.requires_grad]


def _has_copy(root: nn.Module, module: nn.Module, behind: set[int]) -> bool:
    """Tell whether a module that trains is built alike: a teacher or a target network is a copy of its student."""

    def shape(of: nn.Module) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in internals.named_parameters(of)]

    own = shape(module)
    return any(
        type(other) is type(module)
        and shape(other) == own
        and not any(id(p) in behind for p in internals.parameters(other))
        for other in internals.modules(root)
    )
