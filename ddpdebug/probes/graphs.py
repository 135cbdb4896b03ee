"""Counts the steps whose autograd graphs are still alive, exactly and at the cost of one small object a step.

A node of the graph has a Python dictionary for metadata (torch's anomaly detection keeps its tracebacks there), which
dies with the node. A mark in it that says so when it dies tells how long the graph lives, whoever holds it and through
however many other tensors: `losses.append(loss)` and `total = total + loss` alike.
"""

from __future__ import annotations

from typing import Any

_KEY = "ddpdebug"
_MAX_HOPS = 64


class _Mark:
    """Lies in the metadata of a node; leaves the table when the node dies."""

    __slots__ = ("step", "table")

    def __init__(self, step: int, table: dict[int, int]) -> None:
        self.step, self.table = step, table
        table[step] = table.get(step, 0) + 1

    def __del__(self) -> None:
        left = self.table.get(self.step, 0) - 1
        if left > 0:
            self.table[self.step] = left
        else:
            self.table.pop(self.step, None)


class LiveGraphs:
    """The steps with living graphs, numbered by the calls of `end_step`."""

    def __init__(self) -> None:
        self._step = 0
        self._alive: dict[int, int] = {}  # step -> marks

    def mark(self, node: Any) -> None:
        """Follow the life of a graph, given a node far down in it.

        The mark lies as far up as a short walk leads: whatever tensor of the graph is kept keeps what is above it.
        """
        known = self._step in self._alive  # a loss lies below the output that was marked
        for _ in range(0 if known else _MAX_HOPS):
            further = next((above for above, _ in node.next_functions if _is_inner(above)), None)
            if further is None:
                break
            node = further
        try:
            metadata = node.metadata
        except (AttributeError, RuntimeError):  # a custom function of an old style has none
            return
        if _KEY not in metadata:
            metadata[_KEY] = _Mark(self._step, self._alive)

    def end_step(self) -> int:
        """Return how many steps before this one have living graphs; the next step begins."""
        count = len(self._alive) - (self._step in self._alive)
        self._step += 1
        return count


def _is_inner(node: Any) -> bool:
    """Tell whether a node belongs to one pass only, unlike that of a parameter."""
    return node is not None and not hasattr(node, "variable")


def marked_step(node: Any) -> int | None:
    """Return the number of the step whose mark a node carries."""
    try:
        mark = node.metadata.get(_KEY)
    except (AttributeError, RuntimeError):
        return None
    return mark.step if isinstance(mark, _Mark) else None
