"""The gradient that enters the model from the loss: whether it is finite separates the loss function from the model.

A hook before the backward of each output's node sees it. It belongs to the graph, not to the user's tensors, and holds
neither of them. What is returned beside the result (hidden states) often feeds the result too: its gradient is then a
sum with what the model's own backward gives, and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import ranges
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.schema.details import EntryGradient

_MAX_NODES = 20_000

Locate = Callable[[Looks], None]


def watch_entry(outputs: Sequence[torch.Tensor], looks: Looks, guard: Guard, locate: Locate) -> None:
    """Check the gradients of a checked forward's outputs; `locate` is called while a bad one arrives."""
    found = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    nodes = {id(node): node for node in found}
    if len(nodes) > 1 and any([tensor.device.type != "cpu" for tensor in outputs]):
        return  # by the time that anything is known of it there, the graph has gone
    for node in nodes.values():
        others = [other for other in nodes.values() if other is not node]
        outside = not _reach(others, node)  # only the loss gives this output a gradient
        entries_of(guard).before_node("probe:entry", node, _Entry(looks, locate, outside=outside).look)


class _Entry:
    """The hook of one output."""

    def __init__(self, looks: Looks, locate: Locate, *, outside: bool) -> None:
        self._looks, self._locate, self._outside = looks, locate, outside

    def look(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Look at the gradients that come in."""
        for gradient in gradients:
            if gradient is None or (seen := ranges.look(gradient)) is None:
                continue
            if gradient.device.type != "cpu":
                self._looks.later_entries.append(seen)
                continue
            low, high = float(seen[0]), float(seen[1])
            finite = math.isfinite(low) and math.isfinite(high)
            if not finite and not self._outside:
                continue
            known = self._looks.entry or EntryGradient(finite=True, range=(low, high))
            span = min(known.range[0], low), max(known.range[1], high)
            self._looks.entry = EntryGradient(finite=known.finite and finite, range=span if finite else (low, high))
            if not finite:
                self._locate(self._looks)


def _reach(starts: Sequence[Any], target: Any) -> bool:
    """Whether the graph leads from some nodes to another, made before them; also when it is too large to tell."""
    oldest = internals.sequence_of(target)
    seen, waiting = set(starts), [node for node in starts if internals.sequence_of(node) >= oldest]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is target:
                return True
            if node is not None and node not in seen and internals.sequence_of(node) >= oldest:
                seen.add(node)
                waiting.append(node)
        if len(seen) > _MAX_NODES:
            return True
    return False
