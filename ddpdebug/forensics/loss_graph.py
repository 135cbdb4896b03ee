"""Names the operation of a loss expression that made the loss non-finite although the model's outputs were finite.

The expression stands in the user's code and cannot be run again. Its autograd graph is there until backward frees it:
each node has the operands that it needs for backward, from which the operation's result can be computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.ranges import described, is_floating, nonfinite

_MAX_NODES = 10_000
_Saved = Mapping[str, Any]

#: What a node computed, from what it has saved. Nodes that save their result need no entry.
_RESULTS: dict[str, Callable[[_Saved], Any]] = {
    "Log": lambda s: s["self"].log(),
    "Log2": lambda s: s["self"].log2(),
    "Log10": lambda s: s["self"].log10(),
    "Log1P": lambda s: s["self"].log1p(),
    "Div": lambda s: s.get("self", 1) / s["other"],  # the dividend is kept only if the divisor has a gradient
    "Mul": lambda s: s["self"] * s["other"],
    "Pow": lambda s: s["self"] ** s["exponent"],
    "NllLoss": lambda s: s["total_weight"].reciprocal(),  # nothing was counted: every target is ignored
    "NllLoss2D": lambda s: s["total_weight"].reciprocal(),
    "BinaryCrossEntropy": lambda s: torch.nn.functional.binary_cross_entropy(s["self"], s["target"]),
    "KlDiv": lambda s: torch.nn.functional.kl_div(s["self"], s["target"], reduction="sum"),
    "MseLoss": lambda s: torch.nn.functional.mse_loss(s["self"], s["target"]),
}


def explain_loss(loss: torch.Tensor, after: int) -> dict[str, Any] | None:
    """Return a JSON value about the first operation of the loss expression with a non-finite result, or None.

    Called before backward, which frees what is looked at here.

    Args:
        after: the number of the first autograd node that does not belong to the model (`Scene.after`).
    """
    nodes = _nodes(loss, after)
    for node in nodes:
        found = _explain(node)
        if found is not None:
            return {**found, "operations": len(nodes)}
    return None


def _nodes(loss: torch.Tensor, after: int) -> list[Any]:
    """Return the nodes of the loss expression in the order in which they were made."""
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if node is None or node in seen or not after <= internals.sequence_of(node) < 1 << 62:
            continue  # the model's own, or a leaf's
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return sorted(seen, key=internals.sequence_of)


def _explain(node: Any) -> dict[str, Any] | None:
    saved = internals.saved_of(node)
    kind = node.name().removesuffix("0").removesuffix("Backward")
    operands = {k: v for k, v in saved.items() if k != "result" and isinstance(v, torch.Tensor)}
    if any(is_floating(v) and nonfinite(v) for v in operands.values()):
        return None  # not the first
    if kind == "Mean" and _is_empty(saved):
        return {"node": node.name(), "value": "nan", "operands": [{"shape": list(saved.get("self_sym_sizes", ()))}]}
    result = saved.get("result")
    if result is None and kind in _RESULTS:
        try:
            with torch.no_grad():
                result = _RESULTS[kind](saved)
        except (KeyError, RuntimeError, TypeError):  # saved only as far as this backward needs it
            return None
    value = nonfinite(result) if isinstance(result, torch.Tensor) and is_floating(result) else None
    if value is None:
        return None
    numbers = [{"name": k, "value": v} for k, v in saved.items() if isinstance(v, int | float) and k == "exponent"]
    return {
        "node": node.name(),
        "value": value,
        "operands": [{"name": name, **described(tensor)} for name, tensor in operands.items()] + numbers,
    }


def _is_empty(saved: _Saved) -> bool:
    sizes = saved.get("self_sym_sizes", ())
    return saved.get("self_sym_numel") == 0 or 0 in tuple(sizes or ())
