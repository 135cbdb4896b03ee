"""Parameter groups of the optimizers with the names of the models' parameters; JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def holdings(
    optimizers: Sequence[tuple[torch.optim.Optimizer, bool]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Describe optimizers.

    Args:
        optimizers: each with whether it has stepped.
        names: of the models' parameters, by identity.
    """
    return [
        {
            "optimizer": type(optimizer).__name__,
            "stepped": stepped,
            "groups": [_group(group, names) for group in optimizer.param_groups],
        }
        for optimizer, stepped in optimizers
    ]


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    foreign = [p for p in group["params"] if id(p) not in names]
    return {
        "lr": _number(group.get("lr")),
        "initial_lr": _number(group.get("initial_lr")),
        "weight_decay": _number(group.get("weight_decay")),
        "names": [names[id(p)] for p in group["params"] if id(p) in names],
        # parameters of no model that was called: with a gradient the script uses them in another way
        "foreign": [list(p.shape) for p in foreign if p.grad is None],
        "others": sum(p.grad is not None for p in foreign),
    }


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
