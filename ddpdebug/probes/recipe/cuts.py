"""Finds where a forward cuts its graph: looked for once, and only when parameters of modules get no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.values import tensors_in

_MAX_NAMES = 20
_Call = tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]


class Cuts:
    """Looks at one forward of one model.

    Args:
        lacking: the model's parameters that should have had a gradient by now.
    """

    def __init__(self, root: nn.Module, lacking: Sequence[torch.Tensor], entries: Entries) -> None:
        self._root, self._lacking = root, {id(p) for p in lacking}
        self._calls: list[_Call] = []
        self._hook = entries.after_modules("probe:cuts", self._look)
        self._given: set[int] = set()

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Look at the forward that begins now."""
        if not internals.anything_compiled():
            self._given = {t.data_ptr() for t in inputs if internals.is_plain(t)}
            self._hook.on()

    def release(self) -> None:
        """Take the hook away."""
        self._hook.off()

    def end(self) -> dict[str, Any] | None:
        """Take the hook away; say which parameters lie behind which cut."""
        self.release()
        calls, self._calls = self._calls, []
        paths = {id(module): path for path, module in self._root.named_modules()}
        names = {id(p): name for name, p in self._root.named_parameters()}
        found: dict[str, Any] = {}
        behind: dict[str, None] = {}  # what ran up to here without ever getting a gradient
        for i, (module, _, outputs) in enumerate(calls):
            own = [names[id(p)] for p in internals.own_parameters(module) if id(p) in self._lacking]
            behind.update(dict.fromkeys(own))
            if not own or not any(t.requires_grad for t in outputs):
                continue
            target = next((path for call in calls[i + 1 :] if (path := self._cut(outputs, call, paths))), None)
            if target is not None:
                found = {"names": list(behind)[:_MAX_NAMES], "after": paths.get(id(module), "?"), "before": target}
        return found or None

    def _cut(self, outputs: Sequence[torch.Tensor], call: _Call, paths: dict[int, str]) -> str | None:
        """Return the path of a module that was given the outputs, or something of their shape, without their graph."""
        module, inputs, _ = call
        floating = [t for t in inputs if t.is_floating_point() and t.data_ptr() not in self._given]
        if not floating or any(t.requires_grad for t in floating):
            return None
        shapes = {tuple(t.shape) for t in outputs if t.requires_grad}
        return paths.get(id(module)) if any(tuple(t.shape) in shapes for t in floating) else None

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            inputs = [t for t in tensors_in(args) if internals.is_plain(t)]
            self._calls.append((module, inputs, [t for t in tensors_in(output) if internals.is_plain(t)]))
