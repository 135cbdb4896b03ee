"""Modules that ran without gradients in the first training forward, although an optimizer has their parameters.

Told is what ran without gradients alone, and got none in the first steps: activation checkpointing that works, a
siamese branch and a part that trains in every other step do get some. Beside it stands what speaks for an intention: a
part in eval mode, a copy of one that trains, parameters that somebody writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import NoGradPart, NoGradParts

#: Optimizer steps, from 0, without a gradient until it is told: before SYNC207 judges.
LAST = 3
_MAX_NAMES, _MAX_PARTS = 20, 16


class _Part(NamedTuple):
    """A module without gradients, and its parameters with their versions at that time."""

    about: NoGradPart
    prefix: str
    module: weakref.ref[nn.Module]
    marks: Mapping[str, tuple[int, int | None]]  # by name: number and version

    def params(self) -> dict[str, nn.Parameter]:
        """Return those that are still where they were."""
        module = self.module()
        found = {} if module is None else dict(internals.named_parameters(module))
        return {name: p for name, (key, _) in self.marks.items() if (p := found.get(name)) is not None and id(p) == key}

    def lacks_gradients(self) -> bool:
        params = self.params().values()
        return len(params) == len(self.marks) and all([p.grad is None and p.requires_grad for p in params])

    def told(self) -> NoGradPart:
        params = self.params()
        names = tuple([self.prefix + name for name in list(self.marks)[:_MAX_NAMES]])
        written = any(
            [
                name not in params or internals.version_of(params[name]) != version
                for name, (_, version) in self.marks.items()
            ]
        )
        return replace(self.about, names=names, written=written)


class NoGrad:
    """The probe of one model's first forward, and of its parameters in the first steps.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module, entries: Entries) -> None:
        self._root = weakref.ref(root)
        self._hook = entries.after_modules("probe:no-grad", self._look)
        self._with: set[int] = set()  # ids of the parameters of modules that ran with gradients
        self._without: set[int] = set()
        self._lines: dict[int, str | None] = {}  # of modules that ran without, by id, in the order of their returns
        self._parts: list[_Part] = []

    def begin(self) -> None:
        """Observe the forward that begins now."""
        if not internals.anything_compiled():
            self._hook.on()

    def release(self) -> None:
        """Remove the hook."""
        self._hook.off()

    def mark(self, lacking: Iterable[torch.Tensor]) -> None:
        """Record the modules that ran without gradients and whose parameters got none in the first step."""
        root = self._root()
        behind = ({id(p) for p in lacking} & self._without) - self._with
        if root is None or not behind:
            return
        for path, module in self._outermost(root, behind):
            prefix = f"{path}." if path else ""
            inside = [self._lines[id(part)] for part in internals.modules(module) if id(part) in self._lines]
            about = NoGradPart(
                path=path or "the model",
                location=inside[0] if inside else None,
                in_eval=internals.in_train_mode(root) and not internals.in_train_mode(module),
                copy_of=_copy_of(root, module, behind),
            )
            marks = {name: (id(p), internals.version_of(p)) for name, p in _trainable(module)}
            self._parts.append(_Part(about, prefix, weakref.ref(module), marks))

    def keep(self) -> None:
        """Forget modules that have got a gradient since, or were frozen."""
        self._parts = [part for part in self._parts if part.lacks_gradients()]

    def found(self) -> NoGradParts | None:
        """Return the remaining modules; None if there are none."""
        parts = tuple([part.told() for part in self._parts[:_MAX_PARTS]])
        return NoGradParts(parts=parts) if parts else None

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


def _copy_of(root: nn.Module, module: nn.Module, behind: set[int]) -> str | None:
    """Return the path of a module that trains and is built alike, as a student is like its teacher."""

    def shape(of: nn.Module) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in internals.named_parameters(of)]

    own = shape(module)
    same = [
        path
        for path, other in internals.named_modules(root)
        if type(other) is type(module)
        and shape(other) == own
        and not any([id(p) in behind for p in internals.parameters(other)])
    ]
    return same[0] if same else None
