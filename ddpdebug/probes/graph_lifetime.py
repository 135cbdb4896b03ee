"""Counts the steps with living autograd graphs, exactly and at the cost of one small object a step.

A node of the graph has a Python dictionary for metadata (torch's anomaly detection keeps its tracebacks there), which
dies with the node. A mark in it that says so when it dies tells how long the graph lives, whoever holds it and through
however many other tensors: `losses.append(loss)` and `total = total + loss` alike.
"""

from __future__ import annotations

import weakref
from typing import Any

from ddpdebug.isolation.user_code import is_users
from ddpdebug.torch_internals import graph

_KEY = "ddpdebug"
_MAX_HOPS = 64


class _Mark:
    """Lies in the metadata of a node, and dies with it."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: int) -> None:
        self.step = step


class LiveGraphs:
    """The steps with living graphs, numbered by the calls of `end_step`.

    A mark leaves its step's table without any code of ours: a signal that arrives while Python code runs for something
    that dies is handled there, and what its handler raises is lost.
    """

    def __init__(self) -> None:
        self._step = 0
        self._alive: dict[int, set[weakref.ref[_Mark]]] = {}  # step -> marks

    def mark(self, node: Any) -> None:
        """Mark a graph to follow its life, given a node far down in it.

        The mark lies as far up as a short walk leads: whatever tensor of the graph is kept keeps what is above it.
        """
        known = bool(self._alive.get(self._step))  # a loss lies below the output that was marked
        for _ in range(0 if known else _MAX_HOPS):
            further = next(iter([above for above, _ in node.next_functions if _is_inner(above)]), None)
            if further is None:
                break
            node = further
        try:
            metadata = node.metadata
        except (AttributeError, RuntimeError) as error:  # a custom function of an old style has none
            if is_users(error):
                raise
            return
        if _KEY not in metadata:
            mark = metadata[_KEY] = _Mark(self._step)
            table = self._alive.setdefault(self._step, set())
            table.add(weakref.ref(mark, table.discard))

    def end_step(self) -> int:
        """Return the number of earlier steps with living graphs, and begin the next step."""
        for step in [step for step, marks in self._alive.items() if not marks]:
            del self._alive[step]
        count = len(self._alive) - (self._step in self._alive)
        self._step += 1
        return count


def _is_inner(node: Any) -> bool:
    """Return whether a node belongs to one pass only, unlike that of a parameter."""
    return node is not None and not graph.is_leaf(node)


def marked_step(node: Any) -> int | None:
    """Return the step of a node's mark; None if it has none."""
    try:
        mark = node.metadata.get(_KEY)
    except (AttributeError, RuntimeError) as error:
        if is_users(error):
            raise
        return None
    return mark.step if isinstance(mark, _Mark) else None
