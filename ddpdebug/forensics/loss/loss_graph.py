"""Names the operation of a loss expression that made the loss, or its gradient for the model, non-finite.

The expression stands in the user's code and cannot be run again. Its autograd graph is there until backward frees it:
each node has the operands that it needs for backward, from which the operation's result can be computed once more. The
gradients show while backward runs: a hook behind a node sees what it is given and what it makes of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.replay.ranges import described, is_floating, nonfinite
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import is_users
from ddpdebug.probes import ranges
from ddpdebug.probes.entries import entries_of
from ddpdebug.torch_internals import graph

_MAX_NODES = 10_000
_MAX_HOOKS = 64
_MAX_BYTES = 64 << 20  # a larger gradient is not looked at
#: Nodes whose gradient is finite for all finite operands, overflow aside; most losses consist of nothing else.
_HARMLESS = frozenset(
    re.findall(
        r"\w+",
        """
        Sum Mean Neg Add Sub Rsub Abs View Reshape Squeeze Unsqueeze Gather Select Slice Index IndexSelect Transpose T
        Permute Expand Clone Cat Stack Split Unbind Where MaskedFill MaskedSelect Clamp ClampMin ClampMax Relu Max Min
        Maximum Minimum ToCopy ReshapeAlias UnsafeView Softmax LogSoftmax NllLoss NllLoss2D MseLoss SmoothL1Loss
        HuberLoss BinaryCrossEntropyWithLogits Sigmoid LogSigmoid Tanh Softplus Addmm Mm Bmm Mv Dot Convolution
        NativeLayerNorm NativeBatchNorm NativeDropout
        """,
    )
)
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
    # nothing was counted: every target is ignored
    "NllLoss": lambda s: s["total_weight"].reciprocal() if _reduction(s) == "mean" else None,
    "NllLoss2D": lambda s: s["total_weight"].reciprocal() if _reduction(s) == "mean" else None,
    "BinaryCrossEntropy": lambda s: functional.binary_cross_entropy(s["self"], s["target"], reduction=_reduction(s)),
    "KlDiv": lambda s: functional.kl_div(s["self"], s["target"], reduction="sum"),
    "MseLoss": lambda s: functional.mse_loss(s["self"], s["target"], reduction=_reduction(s)),
}


def explain_loss(loss: torch.Tensor, after: int) -> dict[str, Any] | None:
    """Return a JSON value about the loss expression's first operation with a non-finite result; None if there is none.

    Called before backward, which frees what is looked at here.

    Args:
        after: the number of the first autograd node that does not belong to the model (`ForwardCapture.after`).
    """
    nodes = _nodes(loss, after)
    for node in nodes:
        saved = graph.saved_of(node)
        kinds = {name: ranges.kinds_of(*seen) for name, t in _operands(saved).items() if (seen := ranges.read(t))}
        bad = next((saved[name] for name, found in kinds.items() if set(found) - {ranges.MINUS_INF}), None)
        if bad is not None:
            return _handed_on(node, bad, nodes)
        value = None if any(kinds.values()) else _result(node, saved)  # -Inf alone is what masks are made of
        if value is not None:
            return _about(node, value, nodes)
    return None


def _about(node: Any, value: str, nodes: Sequence[Any]) -> dict[str, Any]:
    place = {"index": nodes.index(node), "nodes": [graph.name_of(other) for other in nodes]}
    return {"node": graph.name_of(node), "value": value, "operands": _described(graph.saved_of(node)), **place}


def _handed_on(node: Any, bad: torch.Tensor, nodes: Sequence[Any]) -> dict[str, Any] | None:
    """Return what is to blame for a node's bad operand: the node that made it, or nobody when it has no gradient."""
    value = nonfinite(bad) or "nan"
    if bad.grad_fn is None:
        return {**_about(node, value, nodes), "brought": True}
    return _about(bad.grad_fn, value, nodes) if bad.grad_fn in nodes else None  # None: the model made it


def watch_backward(loss: torch.Tensor, after: int, guard: Guard, tell: Callable[[dict[str, Any]], None]) -> None:
    """Call `tell` with the first operation of a loss expression whose backward makes its gradient non-finite.

    `tell` is called while backward runs, with a JSON value as of `explain_loss`. The hooks belong to the graph and go
    with it; they hold neither nodes nor tensors.
    """
    nodes = _nodes(loss, after)
    names = [graph.name_of(node) for node in nodes]
    risky = [i for i, name in enumerate(names) if kind_of(name) not in _HARMLESS]
    watch = _Watch(names, tell)
    for i in risky[:_MAX_HOOKS]:
        entries_of(guard).after_node("probe:loss-backward", nodes[i], functools.partial(watch.look, i))


class _Watch:
    """The state that the hooks on one graph share."""

    def __init__(self, names: Sequence[str], tell: Callable[[dict[str, Any]], None]) -> None:
        self.names, self._tell = names, tell
        self.over = False

    def look(self, index: int, made: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        """Look at what a node has made of the gradients that it was given; called behind it, and changes nothing."""
        value = None if self.over else _first_bad(made)
        if value is None:
            return
        self.over = True  # what comes later follows from this
        node = internals.current_node()
        if node is None or graph.name_of(node) != self.names[index] or _first_bad(given) is not None:
            return
        about = {"node": self.names[index], "value": value, "index": index, "nodes": list(self.names)}
        saved = graph.saved_of(node)
        self._tell({**about, "operands": _described(saved)})


def _first_bad(gradients: Sequence[torch.Tensor | None]) -> str | None:
    for gradient in gradients:
        if gradient is None or gradient.device.type != "cpu" or gradient.layout is not torch.strided:
            continue
        if gradient.nbytes > _MAX_BYTES:
            continue
        seen = ranges.read(gradient)
        if seen is not None and (kinds := ranges.kinds_of(*seen)):
            return "nan" if "NaN" in kinds else "inf"
    return None


def kind_of(name: str) -> str:
    """Return the operation of a backward node: `NllLoss2D` for `NllLoss2DBackward0`."""
    return name.rstrip("0123456789").removesuffix("Backward")


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


def _operands(saved: _Saved) -> dict[str, torch.Tensor]:
    return {name: value for name, value in saved.items() if name != "result" and isinstance(value, torch.Tensor)}


def _result(node: Any, saved: _Saved) -> str | None:
    """Return "nan" or "inf" when a node's result is not finite, as far as it can be computed from what it has saved."""
    kind = kind_of(graph.name_of(node))
    if kind == "Mean" and _is_empty(saved):
        return "nan"
    result = saved.get("result")
    if result is None and kind in _RESULTS:
        try:
            with torch.no_grad():
                result = _RESULTS[kind](saved)
        except (KeyError, RuntimeError, TypeError) as error:  # saved only as far as this backward needs it
            if is_users(error):
                raise
            return None
    return nonfinite(result) if isinstance(result, torch.Tensor) and is_floating(result) else None


def _described(saved: _Saved) -> list[dict[str, Any]]:
    """Return what a node's operands contain; of its result where it keeps no operand."""
    result = saved.get("result")
    operands = _operands(saved) or ({"result": result} if isinstance(result, torch.Tensor) else {})
    numbers = [{"name": k, "value": v} for k, v in saved.items() if isinstance(v, int | float) and k == "exponent"]
    found = [{"name": name, **described(tensor)} for name, tensor in operands.items()] + numbers
    return found or ([{"shape": list(saved["self_sym_sizes"])}] if _is_empty(saved) else [])


def _reduction(saved: _Saved) -> str:
    return ("none", "mean", "sum")[saved["reduction"]]


def _is_empty(saved: _Saved) -> bool:
    sizes = saved.get("self_sym_sizes", ())
    return saved.get("self_sym_numel") == 0 or 0 in tuple(sizes or ())
