"""What the autograd graph of a loss tells before backward frees it: shapes, labels, what stands before the loss.

Nothing is hooked or patched: the nodes between the loss and the model are read, some tens of them at most, and only of
the first backward passes and in checked steps. Labels are read where they are in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ddpdebug.schema.announcements import DoubleSoftmax, LossBroadcast, TargetRange
from ddpdebug.torch_internals import graph, is_sink

_MAX_NODES = 64
_MAX_POINTWISE = 16
_MAX_LABELS = 1 << 16
_MEAN = 1
#: Nodes that change the form of their input and not its meaning.
_FORM = frozenset(
    f"{name}Backward{i}"
    for name in (
        *("View", "ReshapeAlias", "UnsafeView", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze"),
        *("ToCopy", "Clone", "Slice", "Select", "Index", "Alias"),
    )
    for i in (0, 1, 2)
)
_SCALAR_SUMS = frozenset({"AddBackward0", "SumBackward0", "StackBackward0", "ToCopyBackward0", "SqueezeBackward0"})
_SCALED = frozenset({"DivBackward0", "MulBackward0"})
_CLASSES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_BINARY = frozenset({"BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0"})
_ELEMENTWISE = frozenset({"MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0"})
_MEANS = frozenset({"MeanBackward0"})
_POINTWISE = frozenset(
    f"{name}Backward{i}"
    for name in (
        "Pow",
        "Abs",
        "Neg",
        "Mul",
        "Div",
        "Add",
        "Sub",
        "Where",
        "Clamp",
        "ClampMin",
        "Sqrt",
        "Exp",
        "Log",
        "Relu",
    )
    for i in (0, 1)
)
_PROBABILITIES = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}


class Term(NamedTuple):
    """A loss function in the graph."""

    node: Any
    scaled: bool  # it was multiplied or divided on its way to the root


def terms(root: torch.Tensor, *, by_scaler: bool) -> list[Term]:
    """Return the loss functions that a loss is made of; what GradScaler multiplied the loss with does not count."""
    found: list[Term] = []
    waiting = [(root.grad_fn, False)]
    if by_scaler and root.grad_fn is not None and root.grad_fn.name() in _SCALED:
        waiting = [(node, False) for node, _ in root.grad_fn.next_functions if node is not None]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node, scaled = waiting.pop(0)
        if node is None:
            continue
        name = node.name()
        if name in _CLASSES or name in _BINARY or name in _ELEMENTWISE or name in _MEANS:
            found.append(Term(node, scaled))
        elif name in _SCALED or name in _SCALAR_SUMS or name == "NegBackward0":
            waiting += [(below, scaled or name in _SCALED) for below, _ in node.next_functions]
    return found


def is_mean(term: Term) -> bool:
    """Tell whether a loss function averages over its elements."""
    return term.node.name() in _MEANS or graph.saved_number(term.node, "reduction") == _MEAN


def facts(term: Term) -> Iterator[DoubleSoftmax | TargetRange | LossBroadcast]:
    """Yield what is wrong with the use of one loss function."""
    node = term.node
    name = node.name()
    if name in _CLASSES or name == "BinaryCrossEntropyWithLogitsBackward0":
        before = _probabilities(node)
        if before is not None:
            yield DoubleSoftmax(loss=_plain(name), before=before, shape=_shape(node) or ())
    if name in _BINARY:
        span = _range(graph.saved_tensor(node, "target"))
        if span is not None and (span[0] < 0 or span[1] > 1):
            yield TargetRange(loss=_plain(name), low=span[0], high=span[1])
    shapes = _broadcast(node)
    if shapes is not None:
        yield LossBroadcast(loss=_plain(name), prediction=shapes[0], result=shapes[1])


def target_of(term: Term) -> tuple[torch.Tensor | None, int]:
    """Return the class labels that a loss was given, and the label that does not count."""
    if term.node.name() not in _CLASSES:
        return None, 0
    ignored = graph.saved_number(term.node, "ignore_index")
    ignored = -100 if ignored is None else ignored - (1 << 64) * (ignored >= 1 << 63)  # kept without its sign
    return graph.saved_tensor(term.node, "target"), ignored


def labels_of(term: Term) -> tuple[torch.Tensor, int] | None:
    """Return the class labels that count, and the number of classes, where both are in host memory and small."""
    target, ignored = target_of(term)
    logs = graph.saved_tensor(term.node, "self")
    if target is None or logs is None or target.device.type != "cpu" or not 0 < target.numel() <= _MAX_LABELS:
        return None
    kept = target.detach().flatten()
    return kept[kept != ignored], int(logs.shape[1 if logs.dim() > 1 else 0])


def has_weights(term: Term) -> bool:
    """Tell whether the classes of a loss carry weights."""
    return graph.saved_tensor(term.node, "weight") is not None


def name_of(term: Term) -> str:
    """Return the loss function's name as it is in the graph."""
    return _plain(term.node.name())


def _plain(name: str) -> str:
    return name.partition("Backward")[0]


def _shape(node: Any) -> tuple[int, ...] | None:
    own = graph.saved_tensor(node, "self")
    return None if own is None else tuple(own.shape)


def _below(node: Any, index: int = 0) -> Any:
    """Return the node that made an operand, past those that only change its form, and the sinks of DDP."""
    for _ in range(_MAX_NODES):
        if node is None or index >= len(node.next_functions):
            return None
        node, index = node.next_functions[index]
        if node is None or not (node.name() in _FORM or is_sink(node)):
            return node
        if not is_sink(node):
            index = 0
    return None


def _probabilities(node: Any) -> str | None:
    """Say what made probabilities of the tensor that the loss takes for logits, or None."""
    below = _below(node)
    if below is None:
        return None
    if node.name() in _CLASSES:
        if below.name() != "LogSoftmaxBackward0":
            return "softmax without log" if below.name() == "SoftmaxBackward0" else None
        below = _below(below)
    return None if below is None else _PROBABILITIES.get(below.name())


def _range(values: torch.Tensor | None) -> tuple[float, float] | None:
    if values is None or values.device.type != "cpu" or not 0 < values.numel() <= _MAX_LABELS:
        return None
    low, high = values.detach().aminmax()
    span = float(low), float(high)
    return span if all(map(math.isfinite, span)) else None


def _broadcast(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of a prediction of N values and of the N x N table that the loss averages over."""
    if node.name() in _ELEMENTWISE:
        made = node.next_functions[0][0]
        target = graph.saved_tensor(node, "target")
        spread = made is not None and made.name() == "ExpandBackward0" and target is not None and 0 in target.stride()
        return _table(made, made.next_functions[0][0]) if spread else None
    if node.name() not in _MEANS:
        return None
    found = (_spread(made) for made in _pointwise(node.next_functions[0][0]))
    return next((shapes for shapes in found if shapes is not None), None)


def _pointwise(start: Any) -> Iterator[Any]:
    """Yield the nodes whose results have the form of what a loss averages over, up to those that brought it about."""
    waiting, form = [start], None if start is None else graph.shape_at(start)
    for _ in range(_MAX_POINTWISE):
        if not waiting:
            return
        made = waiting.pop(0)
        if made is None or graph.shape_at(made) != form:
            continue
        yield made
        if made.name() in _POINTWISE:
            waiting += list(dict.fromkeys(below for below, _ in made.next_functions))


def _spread(made: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return both shapes where a difference, or a factor, has spread a prediction over a table."""
    if made.name() not in {"SubBackward0", "MulBackward0", "RsubBackward1"}:
        return None
    operands = [below for below, _ in made.next_functions]
    known = [below for below in operands if below is not None]
    found = _table(made, known[0]) if len(known) == 1 and len(operands) > 1 else None
    if found is not None and made.name() == "MulBackward0":  # the factor must have been spread as well
        factors = [t for name in ("self", "other") if (t := graph.saved_tensor(made, name)) is not None]
        return found if any(t.numel() == found[1][0] for t in factors) else None
    return found


def _table(made: Any, prediction: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return both shapes if N values were spread over a table of N x N, and not by an explicit new dimension."""
    if prediction is None or prediction.name() == "UnsqueezeBackward0":
        return None
    own, result = graph.shape_at(prediction), graph.shape_at(made)
    if own is None or result is None or len(result) != 2 or result[0] != result[1] or result[0] < 2:
        return None
    return (own, result) if own in {(result[0],), (result[0], 1)} else None
