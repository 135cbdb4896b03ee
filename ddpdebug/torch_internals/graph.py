"""Reader of the autograd graph: saved tensors of a node, the shape of its result, the leaf of an accumulator."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import torch

from ddpdebug.torch_internals import names

#: Whether torch tells that a hook lies on what a node has saved.
TELLS_HOOKS = not any([name.endswith(" (missing)") for name in (names.SAVED_DATA, names.SAVED_HOOK)])


class SavedHooks:
    """The nodes that may have hooks on their saved tensors, for a torch that does not show them.

    Nodes have growing numbers, in each thread its own. Those that were made inside of `saved_tensors_hooks` have
    numbers from where it was entered to where it was left; nodes of another thread with such a number are left alone.
    """

    MOST = 256

    def __init__(self) -> None:
        self._from = sys.maxsize  # nobody looks yet
        self._open: list[tuple[int, int]] = []
        self._closed: deque[tuple[int, int]] = deque()

    def begin(self) -> None:
        """Start to observe: existing nodes count as possibly hooked."""
        self._from = int(names.next_sequence())
        self._open.clear()
        self._closed.clear()

    def end(self) -> None:
        """Stop observing: from now on all nodes count as possibly hooked."""
        self._from = sys.maxsize

    def entered(self, *_: Any, **__: Any) -> None:
        """Note that a `saved_tensors_hooks` context is entered in this thread."""
        self._open.append((threading.get_ident(), int(names.next_sequence())))

    def left(self, *_: Any, **__: Any) -> None:
        """Note that this thread's innermost `saved_tensors_hooks` context is left."""
        here, now = threading.get_ident(), int(names.next_sequence())
        at = next(iter([at for at in reversed(range(len(self._open))) if self._open[at][0] == here]), None)
        if at is None:  # they were there before anybody looked
            self._from = max(self._from, now)
            return
        start = self._open.pop(at)[1]
        if start < now:
            self._closed.append((start, now))
            if len(self._closed) > self.MOST:
                self._from = max(self._from, self._closed.popleft()[1])

    def registered(self, *_: Any, **__: Any) -> None:
        """Note that a hook is put on one saved tensor, which may belong to any node."""
        self._from = sys.maxsize

    def may_lie_on(self, node: Any) -> bool:
        """Whether a node's saved tensors may have hooks."""
        number = int(names.sequence(node)())
        return bool(
            number < self._from
            or any([start <= number for _, start in tuple(self._open)])  # other threads add to both
            or any([start <= number < stop for start, stop in tuple(self._closed)])
        )


saved_hooks = SavedHooks()


def name_of(node: Any) -> str:
    """Return the name of a node: "NllLossBackward0". An attribute of it called `name` is the script's."""
    return str(type(node).name(node))


def shape_at(node: Any, index: int = 0) -> tuple[int, ...] | None:
    """Return the shape of a node's result; None if unknown."""
    metadata = getattr(node, names.INPUT_METADATA, None)
    if not metadata or index >= len(metadata):
        return None
    shape = getattr(metadata[index], "shape", None)
    return None if shape is None else (*map(int, shape),)


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """Return a saved tensor of a node; None if there is none, or if a user's hook would have to run."""
    if not TELLS_HOOKS:
        return _saved_without_hook(node, name)
    raw = getattr(node, f"{names.RAW_SAVED}{name}", None)
    if raw is None or getattr(raw, names.SAVED_HOOK, None) is not None:
        return None
    data = getattr(raw, names.SAVED_DATA)
    return data if isinstance(data, torch.Tensor) else None


def _saved_without_hook(node: Any, name: str) -> torch.Tensor | None:
    if saved_hooks.may_lie_on(node):
        return None
    try:
        data = getattr(node, f"{names.SAVED}{name}", None)
    except RuntimeError:  # backward has freed it, or it was written to since
        return None
    return data.detach() if isinstance(data, torch.Tensor) else None


def saved_of(node: Any) -> dict[str, Any]:
    """Return what a node has saved for backward, as far as it still exists and no hook of the user's would have to run.

    A hook may read a file, or run a checkpointed function again.
    """
    found: dict[str, Any] = {}
    for attribute in dir(node):
        name = attribute.removeprefix(names.SAVED)
        if not attribute.startswith(names.SAVED):
            continue
        try:
            if not _has_hook(node, name):
                found[name] = getattr(node, attribute)
        except (RuntimeError, AttributeError) as error:
            if type(error) not in {RuntimeError, AttributeError}:
                raise  # torch says by these that backward has freed it; a class below them is somebody else's
    return {name: value for name, value in found.items() if value is not None}


def _has_hook(node: Any, name: str) -> bool:
    """Return whether a hook may lie on what a node has saved under a name."""
    if not TELLS_HOOKS:
        return saved_hooks.may_lie_on(node)
    raw = getattr(node, f"{names.RAW_SAVED}{name}", ())
    return any([getattr(one, names.SAVED_HOOK, None) is not None for one in (raw if type(raw) is tuple else (raw,))])


def saved_number(node: Any, name: str) -> int | None:
    """Return a saved integer of a node; None if there is none."""
    value = saved_setting(node, name)
    return value if isinstance(value, int) else None


def saved_numbers(node: Any, name: str) -> list[int]:
    """Return the saved integers of a node, such as dimensions; empty if there are none."""
    value = getattr(node, f"{names.SAVED}{name}", None)
    return [one - (1 << 64) * (one >= 1 << 63) for one in value] if isinstance(value, tuple) else []


def saved_setting(node: Any, name: str) -> float | None:
    """Return a saved number of a node; None if there is none."""
    value = getattr(node, f"{names.SAVED}{name}", None)
    if isinstance(value, int):
        return value - (1 << 64) * (value >= 1 << 63)  # kept without its sign
    return value if isinstance(value, float) else None


def is_leaf(node: Any) -> bool:
    """Return whether a node accumulates the gradient of a parameter, or of another leaf."""
    return hasattr(type(node), "variable")  # on the node itself it is the script's


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the tensor whose gradient a node accumulates; None for other nodes."""
    variable = node.variable if is_leaf(node) else None
    return variable if isinstance(variable, torch.Tensor) else None


def milestones_of(scheduler: Any) -> list[int]:
    """Return the numbers of calls after which the second and later parts of a scheduler begin."""
    return list(getattr(scheduler, names.MILESTONES, ()))


def parts_of(scheduler: Any) -> list[Any]:
    """Return the schedulers that a scheduler combines."""
    return list(getattr(scheduler, names.SCHEDULERS, ()))
