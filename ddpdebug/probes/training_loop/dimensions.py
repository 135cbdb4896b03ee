"""The dimensions along which a loss's classes and the weights of attention lie, followed down the autograd graph.

A view where a transpose was meant, or a softmax over another dimension than the one that is summed over, gives tensors
of the right shape. Where an operation is not known, nothing is said. Read once for each line that calls backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddpdebug.probes.training_loop.loss_graph import CLASSES, Term, plain_name
from ddpdebug.schema.announcements import LossBroadcast
from ddpdebug.torch_internals import graph, is_sink

_MAX_NODES, _MAX_STEPS = 2048, 32
#: Operations whose result has the elements of their operand in the same order.
_FLAT = frozenset(
    f"{name}Backward{i}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Flatten", "Unflatten")
    for i in range(3)
)
#: Operations that leave each dimension what it is.
_SAME = frozenset(
    f"{name}Backward{i}"
    for name in (
        *("Clone", "ToCopy", "Alias", "Slice", "Expand", "Add", "Sub", "Mul", "MaskedFill", "Where", "Clamp", "Neg"),
        *("NativeDropout", "UpsampleBilinear2D", "UpsampleNearest2D"),
    )
    for i in range(3)
)
#: Of these what may stand between a softmax and what uses it: another form; dropout is looked at by itself.
_KEPT = _SAME - {f"{name}Backward{i}" for name in ("Add", "Sub", "Mul", "Where", "Clamp") for i in range(3)}
#: What may also stand between the product of queries and keys and its softmax, which divides by a number.
_SCORES = frozenset({"DivBackward0", "DivBackward1", "TanhBackward0"})
_OF_WEIGHTS = frozenset({"TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0"})
_SOFTMAX = frozenset({"SoftmaxBackward0"})
_PRODUCT = frozenset({"BmmBackward0", "BaddbmmBackward0"})

Dimensions = frozenset[int]
#: A node's result, and some of its dimensions.
Place = tuple[Any, int, Dimensions]


def mixed_up(found: Sequence[Term], root: torch.Tensor) -> list[LossBroadcast]:
    """Return where the graph of a loss takes one dimension for another."""
    known = [*(mixed_classes(term) for term in found), mixed_attention(root)]
    return [one for one in known if one is not None]


def mixed_classes(term: Term) -> LossBroadcast | None:
    """Return a cross entropy whose classes are not what the last layer or the softmax has as classes."""
    node = term.node
    if graph.name_of(node) not in CLASSES or not node.next_functions:
        return None
    below, index = node.next_functions[0]
    shape = None if below is None else graph.shape_at(below, index)
    if not shape or len(shape) < 2 or shape[1] < 2:
        return None
    place: Place | None = (below, index, frozenset({1}))
    for made, at, dims in _down(place, _KEPT):
        name, own = graph.name_of(made), graph.shape_at(made, at)
        if name == "LogSoftmaxBackward0":
            over = graph.saved_number(made, "dim")
            if own and over is not None and over % len(own) not in dims and own[over] > 1:
                pairs = any([own[dim] == own[over] for dim in dims])  # each with each, both ways round
                return None if pairs else _told(node, "softmax", own, shape)
            below, index = made.next_functions[0]
            again = mixed_from((below, index, dims), shape)
            return None if again is None else _told(node, "view", again, shape)
    return None


def mixed_from(place: Place, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the layer's result whose features, as many as there are classes, are not the classes."""
    for made, at, dims in _down(place, _SAME):
        own, feature = graph.shape_at(made, at), _feature(made)
        if own is not None and feature is not None:
            pairs = all([own[dim] == own[feature] for dim in dims])  # each with each, the other way round
            return own if own[feature] == shape[1] and feature not in dims and not pairs else None
    return None


def mixed_attention(root: torch.Tensor) -> LossBroadcast | None:
    """Return a softmax of products whose result is summed over another dimension than that of the softmax."""
    found: dict[Any, LossBroadcast | None] = {}  # softmax -> what is wrong with it; None where one use is right
    for node in _nodes(root.grad_fn):
        if graph.name_of(node) not in _PRODUCT or len(node.next_functions) < 2:
            continue
        left, right = node.next_functions[-2:]
        for weights, values, summed in ((left, right, 2), (right, left, 1)):
            used = None if _is_weight(values[0]) or _softmax_of(values, 1) else _softmax_of(weights, summed)
            other = None if used is None else _softmax_of(weights, 3 - summed)
            if used is not None and other is not None and _of_products(used[0]):
                _note_use(found, used, other[2])
    return next(iter([told for told in found.values() if told is not None]), None)


def _note_use(found: dict[Any, LossBroadcast | None], used: Place, kept: Dimensions) -> None:
    """Note whether a product sums over the dimension of a softmax, or over another one and keeps that."""
    made, at, summed = used
    own, over = graph.shape_at(made, at), graph.saved_number(made, "dim")
    if not own or over is None:
        return
    if over % len(own) in summed:
        found[made] = None
    elif over % len(own) in kept:
        told = LossBroadcast(loss="Softmax", prediction=own, mixed="attention", summed=tuple(sorted(summed)))
        found.setdefault(made, told)


def _softmax_of(operand: tuple[Any, int], dim: int) -> Place | None:
    """Return the softmax that an operand is, in another form or behind dropout, and its dimension there."""
    for place in _down((*operand, frozenset({dim})), _KEPT):
        if graph.name_of(place[0]) in _SOFTMAX:
            return place
    return None


def _of_products(softmax: Any) -> bool:
    """Return whether a softmax is taken of products of two results, as of queries and keys."""
    below, index = softmax.next_functions[0]
    shape = None if below is None else graph.shape_at(below, index)
    every = frozenset(range(len(shape or ())))
    for made, _, _ in _down((below, index, every), _SAME | _SCORES):
        if graph.name_of(made) in _PRODUCT:
            return not any([operand is None or _is_weight(operand) for operand, _ in made.next_functions[-2:]])
    return False


def _told(node: Any, kind: str, before: tuple[int, ...], shape: tuple[int, ...]) -> LossBroadcast:
    loss = plain_name(graph.name_of(node))
    return LossBroadcast(loss=loss, prediction=before, result=shape, mixed="view" if kind == "view" else "softmax")


def _feature(node: Any) -> int | None:
    """Return the dimension of a layer's result in which its features lie; None if it is no such layer."""
    name = graph.name_of(node)
    if name.startswith(("Convolution", "MkldnnConvolution", "CudnnConvolution")):
        return 1
    if name not in {"AddmmBackward0", "MmBackward0"}:
        return None
    (left, _), (right, _) = node.next_functions[-2:]
    if _is_weight(left) == _is_weight(right):
        return None
    if _is_weight(right):
        return 1
    return None if right is None else 0  # else a frozen weight may have no node, and the input be what is trained


def _is_weight(node: Any) -> bool:
    """Return whether an operand is a parameter, possibly transposed or in another type."""
    for _ in range(_MAX_STEPS):
        if node is None:
            return False
        if graph.is_leaf(node):
            return True
        if graph.name_of(node) not in _FLAT | _OF_WEIGHTS and not is_sink(node):
            return False
        node = node.next_functions[0][0]
    return False


def _down(place: Place | None, passed: frozenset[str]) -> Iterator[Place]:
    """Yield results further and further below, with the same dimensions, as long as operations are known."""
    for _ in range(_MAX_STEPS):
        if place is None or place[0] is None:
            return
        yield place
        place = _below(place, passed)


def _below(place: Place, passed: frozenset[str]) -> Place | None:  # noqa: PLR0911 - one for each kind
    node, index, dims = place
    if is_sink(node):  # of DDP: as many results as operands
        return (*node.next_functions[index], dims) if index < len(node.next_functions) else None
    name, shape = graph.name_of(node), graph.shape_at(node, index)
    if shape is None:
        return None
    if name in _FLAT:
        below, at = node.next_functions[0]
        source = None if below is None else graph.shape_at(below, at)
        found = None if source is None else _through_view(shape, source, dims)
        return None if found is None else (below, at, found)
    if name in {"TransposeBackward0", "TBackward0"}:
        first, second = (0, 1) if name == "TBackward0" else (graph.saved_number(node, key) for key in ("dim0", "dim1"))
        if first is None or second is None or not shape:
            return None
        swap = {first % len(shape): second % len(shape), second % len(shape): first % len(shape)}
        return (*node.next_functions[0], frozenset(swap.get(dim, dim) for dim in dims))
    if name == "PermuteBackward0":
        order = graph.saved_numbers(node, "dims")
        return (*node.next_functions[0], frozenset(order[dim] % len(order) for dim in dims)) if order else None
    if name not in passed and not (name == "MulBackward0" and _is_dropout(node, shape)):
        return None
    for below, at in node.next_functions:
        source = None if below is None else graph.shape_at(below, at)
        if source is not None and len(source) == len(shape) and all([source[dim] == shape[dim] for dim in dims]):
            return below, at, dims
    return None


def _is_dropout(node: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a product is that with a mask of the same shape, as dropout makes it."""
    mask = graph.saved_tensor(node, "other")
    return mask is not None and not mask.requires_grad and tuple(mask.shape) == shape


def _through_view(result: tuple[int, ...], source: tuple[int, ...], dims: Dimensions) -> Dimensions | None:
    """Return the dimensions of the operand in which the elements of these dimensions of a view lie."""
    if math.prod(result) != math.prod(source):
        return None
    spans = [(math.prod(result[dim + 1 :]), result[dim]) for dim in dims]
    found = set[int]()
    for dim, size in enumerate(source):
        inner = math.prod(source[dim + 1 :])
        if size > 1 and any([inner < start * length and start < inner * size for start, length in spans]):
            found.add(dim)
    return frozenset(found) or None


def _nodes(start: Any) -> Iterator[Any]:
    """Yield the nodes of a graph once each, those near the loss first."""
    waiting, seen = deque([start]), set[Any]()
    for _ in range(_MAX_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [below for below, _ in node.next_functions]
