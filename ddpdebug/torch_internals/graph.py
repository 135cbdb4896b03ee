"""Reading the autograd graph: what a node has saved, the shape of what it made, the leaf behind an accumulator."""

from __future__ import annotations

from typing import Any

import torch

from ddpdebug.torch_internals import names


def shape_at(node: Any, index: int = 0) -> tuple[int, ...] | None:
    """Return the shape of a node's result, None where it is not known."""
    metadata = getattr(node, names.INPUT_METADATA, None)
    if not metadata or index >= len(metadata):
        return None
    shape = getattr(metadata[index], "shape", None)
    return None if shape is None else tuple(map(int, shape))


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that a node has saved, None where it has not, or where a hook of the user would have to run."""
    raw = getattr(node, f"{names.RAW_SAVED}{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    data = raw.data
    return data if isinstance(data, torch.Tensor) else None


def saved_number(node: Any, name: str) -> int | None:
    """Return a plain number that a node has saved."""
    value = getattr(node, f"{names.SAVED}{name}", None)
    return value if isinstance(value, int) else None


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the tensor whose gradient a node accumulates."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) else None


def milestones_of(scheduler: Any) -> list[int]:
    """Return the calls after which each but the first of a scheduler's parts begins."""
    return list(getattr(scheduler, names.MILESTONES, ()))


def parts_of(scheduler: Any) -> list[Any]:
    """Return the schedulers that a scheduler is made of."""
    return list(getattr(scheduler, names.SCHEDULERS, ()))
