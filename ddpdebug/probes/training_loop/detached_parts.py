"""Finds where a forward detaches its graph: searched once, and only when parameters of modules get no gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.nested import tensors_in
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import DetachedParameters

_MAX_NAMES = 20


class _Tensor(NamedTuple):
    """What is noted of a tensor, which may be gone before the forward is over."""

    shape: tuple[int, ...]
    requires_grad: bool
    floating: bool
    address: int


_Call = tuple[nn.Module, list[_Tensor], list[_Tensor]]


class Cuts:
    """The search in one forward of one model.

    Args:
        lacking: the model's parameters that should have had a gradient by now.
    """

    def __init__(self, root: nn.Module, lacking: Sequence[torch.Tensor], entries: Entries) -> None:
        self._root, self._lacking = weakref.ref(root), {id(p) for p in lacking}
        self._calls: list[_Call] = []
        self._hook = entries.after_modules("probe:cuts", self._look)
        self._given: set[int] = set()

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Observe the forward that begins now."""
        if not internals.anything_compiled():
            self._given = {t.data_ptr() for t in inputs if internals.is_plain(t)}
            self._hook.on()

    def release(self) -> None:
        """Remove the hook."""
        self._hook.off()

    def end(self) -> DetachedParameters | None:
        """Remove the hook; return the parameters that the forward detaches, and the place; None if there are none."""
        self.release()
        calls, self._calls = self._calls, []
        root = self._root()
        if root is None:
            return None
        paths = {id(module): path for path, module in internals.named_modules(root)}
        names = {id(p): name for name, p in internals.named_parameters(root)}
        found: DetachedParameters | None = None
        behind: dict[str, None] = {}  # what ran up to here without ever getting a gradient
        for i, (module, _, outputs) in enumerate(calls):
            own = [names[id(p)] for p in internals.own_parameters(module) if id(p) in self._lacking]
            behind.update(dict.fromkeys(own))
            if not own or not any([t.requires_grad for t in outputs]):
                continue
            target = None
            for call in calls[i + 1 :]:
                if (target := self._cut(outputs, call, paths)) is not None:
                    break
            if target is not None:
                cut_off, after = tuple(behind)[:_MAX_NAMES], paths.get(id(module), "?")
                found = DetachedParameters(names=cut_off, after=after, before=target)
        return found

    def _cut(self, outputs: Sequence[_Tensor], call: _Call, paths: dict[int, str]) -> str | None:
        """Return the path of a module that was given the outputs, or something of their shape, without their graph."""
        module, inputs, _ = call
        floating = [t for t in inputs if t.floating and t.address not in self._given]
        if not floating or any([t.requires_grad for t in floating]):
            return None
        shapes = {t.shape for t in outputs if t.requires_grad}
        return paths.get(id(module)) if any([t.shape in shapes for t in floating]) else None

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._calls.append((module, _noted(args), _noted(output)))


def _noted(value: Any) -> list[_Tensor]:
    return [
        _Tensor(tuple(t.shape), t.requires_grad, t.is_floating_point(), t.data_ptr())
        for t in tensors_in(value)
        if internals.is_plain(t) and t.layout == torch.strided and not t.is_nested
    ]
