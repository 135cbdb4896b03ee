"""Facts from a loss's autograd graph before backward frees it: shapes, labels, the operation before the loss.

Nothing is hooked or patched: the nodes between the loss and the model are read, some tens of them at most, and only of
the first backward passes and in checked steps. Labels are read where they are in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ddpdebug.probes import async_copy as device
from ddpdebug.schema.announcements import LossBroadcast, LossInput, SoftmaxOfOne, TargetCases, TargetRange
from ddpdebug.torch_internals import graph, is_plain, is_sink

_MAX_NODES = 64
_MAX_POINTWISE = 16
_MAX_LABELS = 1 << 16
_LEAST_CASES = 32  # targets among which a case that none has is missing, and not left out by chance
_MAX_ROWS = 16
_MEAN, _SUM = 1, 2
_ROUNDING = 0.01  # of the sum of a distribution in 16 bits
#: Nodes that change the form of their input and not its meaning.
FORM = frozenset(
    f"{name}Backward{i}"
    for name in (
        *("View", "ReshapeAlias", "UnsafeView", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze"),
        *("ToCopy", "Clone", "Slice", "Select", "Index", "Alias"),
    )
    for i in (0, 1, 2)
)
_SCALAR_SUMS = frozenset({"AddBackward0", "SumBackward0", "StackBackward0", "ToCopyBackward0", "SqueezeBackward0"})
_SCALED = frozenset({"DivBackward0", "MulBackward0"})
CLASSES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_CTC = ("CtcLoss", "CudnnCtcLoss")
_BINARY = frozenset({"BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0"})
_ELEMENTWISE = frozenset({"MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0"})
_MEANS = frozenset({"MeanBackward0"})
_SIGNED = frozenset({"SoftMarginLossBackward0"})
_LOSSES = CLASSES | _BINARY | _ELEMENTWISE | _MEANS | _SIGNED
_SUMS = frozenset({"SumBackward0"})
_PAIRS = frozenset({"SubBackward0", "MulBackward0", "RsubBackward1"})
_SOFTMAX = frozenset({"LogSoftmaxBackward0", "SoftmaxBackward0"})
#: What may stand between a softmax and the loss that is made of it.
_AFTER_SOFTMAX = frozenset(
    {
        *FORM,
        *_SCALAR_SUMS,
        *_SCALED,
        *CLASSES,
        *_MEANS,
        "NegBackward0",
        "DivBackward1",
        "MulBackward1",
        "MaskedFillBackward0",
        "SumBackward1",
        "MeanBackward1",
    }
    | {"LogBackward0"}
)
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


class Term(NamedTuple):
    """A loss function in the autograd graph."""

    node: Any
    scaled: bool  # it was multiplied or divided on its way to the root


def terms(root: torch.Tensor, *, by_scaler: bool) -> list[Term]:
    """Return the loss functions in a loss's graph; GradScaler's multiplication does not count."""
    found: list[Term] = []
    waiting = [(root.grad_fn, False)]
    if by_scaler and root.grad_fn is not None and graph.name_of(root.grad_fn) in _SCALED:
        waiting = [(node, False) for node, _ in root.grad_fn.next_functions if node is not None]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node, scaled = waiting.pop(0)
        if node is None:
            continue
        name = graph.name_of(node)
        if name in _LOSSES:
            found.append(Term(node, scaled))
        elif name in _SCALED or name in _SCALAR_SUMS or name == "NegBackward0" or _subtracts_losses(node):
            waiting += [(below, scaled or name in _SCALED) for below, _ in node.next_functions]
        elif name in FORM and graph.name_of(below := _below_form(node)) in CLASSES:
            found.append(Term(below, scaled))  # one number for each label, in another form: as masks have it
    return found


def _subtracts_losses(node: Any) -> bool:
    """Return whether a term of a loss is taken off another, as a bonus for entropy is."""
    return graph.name_of(node) == "SubBackward0" and graph.shape_at(node) == ()


def _below_form(node: Any) -> Any:
    for _ in range(_MAX_POINTWISE):
        below = node.next_functions[0][0] if graph.name_of(node) in FORM and node.next_functions else None
        if below is None:
            break
        node = below
    return node


def divisor(root: torch.Tensor, *, by_scaler: bool) -> float:
    """Return the number by which a loss was last divided, 1 without a division; GradScaler's scale does not count."""
    node = below_scaler(root, by_scaler=by_scaler)
    number = None if node is None else scaled_by(node)
    return 1.0 if number is None else number


class Chain(NamedTuple):
    """The way from a loss function to the number given to backward: its divisors, the last division first."""

    node: Any  # the loss function, or the sum over its elements
    divisors: tuple[float, ...]
    mean: bool  # the loss function averages by itself


def chain(root: torch.Tensor, *, by_scaler: bool) -> Chain | None:
    """Return the divisors of a loss of one term; None if it has several terms, or unknown operations."""
    node, divisors = below_scaler(root, by_scaler=by_scaler), list[float]()
    for _ in range(_MAX_POINTWISE):
        if node is None:
            return None
        name, number = graph.name_of(node), scaled_by(node)
        if name in _LOSSES or name in _SUMS:
            return Chain(node, tuple(divisors), is_mean(Term(node, scaled=False)))
        if number is not None:
            divisors.append(number)
        elif name not in FORM and name != "NegBackward0":
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def counted(node: Any) -> float | None:
    """Return the number of labels in a loss function's mean, if it has saved one that can be read; else None."""
    target, number = graph.saved_tensor(node, "target"), graph.saved_tensor(node, "total_weight")
    if target is None or number is None or number.device.type != "cpu" or not number.numel():
        return None
    return float(number)


def below_scaler(root: torch.Tensor, *, by_scaler: bool) -> Any:
    """Return the last node of a loss before GradScaler's multiplication."""
    node = root.grad_fn
    if by_scaler and node is not None and graph.name_of(node) in _SCALED:
        node = next(iter([below for below, _ in node.next_functions if below is not None]), None)
    return node


def share(root: torch.Tensor, *, by_scaler: bool) -> Callable[[], float] | None:
    """Return a function that gives the share of its divisor's labels that a summed loss covers.

    None where the loss is something else. On a device both numbers may be there: what is returned may wait for it.
    """
    node, product, there = below_scaler(root, by_scaler=by_scaler), 1.0, []
    if node is not None and is_sink(node):
        node = _below(node, root.output_nr) if node is root.grad_fn else None
    for _ in range(_MAX_POINTWISE):
        if node is None or graph.name_of(node) in CLASSES:
            break
        number = scaled_by(node)
        if number is not None:
            product *= number
        elif (other := _divisor_on_device(node)) is not None:
            there.append(other)
        elif graph.name_of(node) not in FORM:
            return None
        node = _below(node)
    if node is None or graph.name_of(node) not in CLASSES or graph.saved_number(node, "reduction") != _SUM:
        return None
    count = graph.saved_tensor(node, "total_weight")
    return None if count is None else _quotient(count, product, there)


def _quotient(count: torch.Tensor, product: float, there: list[torch.Tensor]) -> Callable[[], float]:
    if count.device.type == "cpu":
        known = float(count) / product
        return lambda: known
    read = device.numbers([count, *there])

    def later() -> float:
        number, *divisors = read()
        whole = product * math.prod(divisors)
        return number / whole if whole else math.nan

    return later


def _divisor_on_device(node: Any) -> torch.Tensor | None:
    if graph.name_of(node) != "DivBackward0" or node.next_functions[1][0] is not None:
        return None
    other = graph.saved_tensor(node, "other")
    if other is None or other.numel() != 1 or other.device.type == "cpu":
        return None
    return other.detach().reshape(())


def scaled_by(node: Any) -> float | None:
    """Return the number that an operation divides by; None for other operations, or if the number is unknown."""
    if graph.name_of(node) not in _SCALED or node.next_functions[1][0] is not None:
        return None
    other = graph.saved_tensor(node, "other")
    if other is None or other.numel() != 1 or other.device.type != "cpu" or not float(other):
        return None
    return float(other) if graph.name_of(node) == "DivBackward0" else 1 / float(other)


def is_multiplied(root: torch.Tensor) -> bool:
    """Return whether the last operation on a loss multiplies it by more than 1, as a loss scale does."""
    number = None if root.grad_fn is None else scaled_by(root.grad_fn)
    return number is not None and number < 1


def is_scaled_in_part(root: torch.Tensor, scale: float) -> bool:
    """Return whether some terms of a loss were multiplied by the loss scale, and others were not."""
    waiting, found = [root.grad_fn], set[bool]()
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            break
        number = scaled_by(node)
        if number is not None and math.isclose(number * scale, 1.0):
            found.add(True)
        elif graph.name_of(node) in _SCALAR_SUMS or number is not None:
            waiting += [below for below, _ in node.next_functions if below is not None]
        else:
            found.add(False)
    return len(found) > 1


def is_mean(term: Term) -> bool:
    """Return whether a loss function averages over its elements."""
    return graph.name_of(term.node) in _MEANS or graph.saved_number(term.node, "reduction") == _MEAN


def takes_classes(term: Term) -> bool:
    """Return whether a loss function takes class indices as targets."""
    return graph.name_of(term.node) in CLASSES


#: What one loss function shows of how it is used.
Fact = LossInput | TargetRange | TargetCases | LossBroadcast


def facts(term: Term) -> Iterator[Fact]:
    """Yield facts about one loss function: the origin of its input, the range of its targets, broadcasting."""
    node = term.node
    name = graph.name_of(node)
    if name in CLASSES or name == "BinaryCrossEntropyWithLogitsBackward0":
        own = graph.saved_tensor(node, "self") if name in CLASSES else None
        total = None if own is None else _total(own.movedim(1, -1) if own.dim() > 1 else own)
        yield LossInput(loss=plain_name(name), before=_made_by(node), shape=_shape(node) or (), total=total)
    if name in _BINARY and (span := _range(graph.saved_tensor(node, "target"))) is not None:
        yield TargetRange(loss=plain_name(name), low=span[0], high=span[1])
    if (cases := _cases(node)) is not None and cases.neither:
        yield cases
    yield from dict.fromkeys(_spreads(node))  # two paths may lead to one


def _softmaxes(root: torch.Tensor) -> Iterator[Any]:
    """Yield the softmaxes that a loss is made of."""
    waiting = [root.grad_fn]
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            return
        name = graph.name_of(node)
        if name in _SOFTMAX:
            yield node
        elif name in _AFTER_SOFTMAX:
            waiting += [below for below, _ in node.next_functions if below is not None]


def softmax_of_one(root: torch.Tensor) -> SoftmaxOfOne | None:
    """Return a softmax over a single entry in the loss's graph; None if there is none."""
    for node in [*_softmaxes(root)]:
        shape, place = graph.shape_at(node), graph.saved_number(node, "dim")
        if shape and place is not None and shape[place] == 1:
            return SoftmaxOfOne(operation=plain_name(graph.name_of(node)), shape=shape)
    return None


def made_of_softmax(found: Sequence[Term], root: torch.Tensor) -> Iterator[LossInput]:
    """Yield the origin of the inputs of losses that are no graph nodes of their own, beside those in `found`."""
    if not any([takes_classes(term) for term in found]) and (soft := soft_target_input(root)) is not None:
        yield soft
    if (divergence := divergence_input(root)) is not None:
        yield divergence
    if (aligned := alignment_input(root)) is not None:
        yield aligned


def soft_target_input(root: torch.Tensor) -> LossInput | None:
    """Return the origin of the input of a cross entropy with soft or smoothed targets, which is no node of its own."""
    for node in [*_softmaxes(root)]:
        if graph.name_of(node) == "LogSoftmaxBackward0":
            before = (plain_name(graph.name_of(node)), *_made_by(node)[:1])
            return LossInput(loss="CrossEntropy", before=before, shape=graph.shape_at(node) or ())
    return None


def divergence_input(root: torch.Tensor) -> LossInput | None:
    """Return the origin of the input of `kl_div`: a sum over targets that add up to one, times the input."""
    waiting = [root.grad_fn]
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            return None
        name, below = graph.name_of(node), [lower for lower, _ in node.next_functions]
        if name == "SubBackward0" and len(below) == 2 and below[0] is None and below[1] is not None:
            product = below[1]
            given = product.next_functions if graph.name_of(product) == "MulBackward0" else ()
            if len(given) == 2 and given[0][0] is None and _adds_up(graph.saved_tensor(product, "self")):
                last = given[1][0]
                last = _below(product, 1) if last is not None else None
                before = [] if last is None else [last, _below(last)]
                names = tuple([plain_name(graph.name_of(lower)) for lower in before if lower is not None])
                return LossInput(loss="KlDiv", before=names, shape=graph.shape_at(product) or ())
        elif name in _SCALED or name in _SCALAR_SUMS or name in _SUMS or name in _MEANS or name in FORM:
            waiting += [lower for lower in below if lower is not None]
        elif name == "SumBackward1":
            waiting += below
    return None


def alignment_input(root: torch.Tensor) -> LossInput | None:
    """Return the origin of the input of `ctc_loss`, which is divided by lengths after its node."""
    waiting = [root.grad_fn]
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            return None
        name = plain_name(graph.name_of(node))
        if name in _CTC:
            logs = graph.saved_tensor(node, "log_probs")
            total = None if logs is None else _total(logs)
            return LossInput(loss="CtcLoss", before=_made_by(node), shape=graph.shape_at(node) or (), total=total)
        if name in {"Where", "Mean", "Sum", "Div", "Mul", "Add"} or graph.name_of(node) in FORM:
            waiting += [lower for lower, _ in node.next_functions if lower is not None]
    return None


def _total(logs: torch.Tensor) -> float | None:
    """Return what the exponentials of the first rows add up to, at most, where they are at hand."""
    if not is_plain(logs) or logs.device.type != "cpu" or not logs.numel() or logs.shape[-1] > _MAX_LABELS:
        return None
    with torch.no_grad():
        total = float(logs.detach().reshape(-1, logs.shape[-1])[:_MAX_ROWS].double().exp().sum(-1).amax())
    return total if math.isfinite(total) else None


def _adds_up(targets: torch.Tensor | None) -> bool:
    """Return whether the rows of targets are distributions, where they are at hand."""
    if (targets := _at_hand(targets)) is None or not targets.dim():
        return False
    with torch.no_grad():
        rows = targets.detach().float()
        return bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < _ROUNDING).all())


def gist(fact: Fact) -> Hashable:
    """Return a key that is equal for two facts about one line if the second says nothing new.

    The number of samples does not count, nor does where exactly between two whole numbers the targets lie.
    """
    if isinstance(fact, LossInput):
        return fact.loss, fact.before
    if isinstance(fact, TargetRange):
        return fact.loss, math.floor(fact.low), math.ceil(fact.high)
    if isinstance(fact, TargetCases):
        return fact.loss
    sizes = fact.prediction + fact.result
    return fact.loss, fact.explicit, fact.mixed, len(fact.prediction), tuple([sizes.index(size) for size in sizes])


def target_of(term: Term) -> tuple[torch.Tensor | None, int]:
    """Return the class labels that a loss was given, and its ignored label."""
    if graph.name_of(term.node) not in CLASSES:
        return None, 0
    ignored = graph.saved_number(term.node, "ignore_index")
    return graph.saved_tensor(term.node, "target"), -100 if ignored is None else ignored


def labels_of(term: Term) -> tuple[torch.Tensor, int] | None:
    """Return the labels that count, and the number of classes; None unless they are small and in host memory."""
    target, ignored = target_of(term)
    logs = graph.saved_tensor(term.node, "self")
    if target is None or logs is None or target.device.type != "cpu" or not 0 < target.numel() <= _MAX_LABELS:
        return None
    kept = target.detach().flatten()
    return kept[kept != ignored], int(logs.shape[1 if logs.dim() > 1 else 0])


def has_weights(term: Term) -> bool:
    """Return whether a loss has class weights."""
    return graph.saved_tensor(term.node, "weight") is not None


def name_of(term: Term) -> str:
    """Return the loss function's name in the graph."""
    return plain_name(graph.name_of(term.node))


def plain_name(name: str) -> str:
    """Return the name of an operation from its node: "NllLoss" from "NllLossBackward0"."""
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
        if node is None or not (graph.name_of(node) in FORM or is_sink(node)):
            return node
        if not is_sink(node):
            index = 0
    return None


def _made_by(node: Any) -> tuple[str, ...]:
    """Name the two operations that made what a loss was given, the last one first."""
    last = _below(node)
    known = (last, None if last is None else _below(last))
    return tuple([plain_name(graph.name_of(below)) for below in known if below is not None])


def _range(values: torch.Tensor | None) -> tuple[float, float] | None:
    if (values := _at_hand(values)) is None:
        return None
    low, high = values.detach().aminmax()
    span = float(low), float(high)
    return span if all(map(math.isfinite, span)) else None


def _cases(node: Any) -> TargetCases | None:
    """Return how many targets are neither 1 nor -1 of a loss that has a case for each of the two, and for no other.

    Some may be left out on purpose: it counts only where no target of many is -1.
    """
    if graph.name_of(node) not in _SIGNED:
        return _choices(node)
    target = _at_hand(graph.saved_tensor(node, "target"))
    if target is None or target.numel() < _LEAST_CASES or bool((target < 0).any()):
        return None
    return TargetCases(loss="SoftMargin", neither=int((target == 0).sum()), targets=target.numel())


def _choices(node: Any) -> TargetCases | None:
    """Return the same of a mean of two choices.

    torch's `cosine_embedding_loss` chooses by "is 1" and by "is -1", `hinge_embedding_loss` by "is not -1" and by "is
    not 1", each with a margin in one of the two.
    """
    made = node.next_functions[0][0] if graph.name_of(node) in _MEANS else None
    pair = [] if made is None or graph.name_of(made) != "AddBackward0" else [b for b, _ in made.next_functions]
    if [graph.name_of(choice) for choice in pair if choice is not None] != ["WhereBackward0"] * 2:
        return None
    first, second = (_at_hand(graph.saved_tensor(choice, "condition")) for choice in pair)
    if first is None or second is None or first.dim() != 1 or not len(first) == len(second) >= _LEAST_CASES:
        return None
    below = [[graph.name_of(b) for b, _ in choice.next_functions if b is not None] for choice in pair]
    if below == [["SubBackward0"], ["ClampMinBackward0"]] and bool(first.any()) and not bool(second.any()):
        return TargetCases(loss="CosineEmbedding", neither=int((~first).sum()), targets=len(first))
    if below[0] == ["ClampMinBackward0"] and len(below[1]) == 1 and bool(second.all()) and not bool(first.all()):
        return TargetCases(loss="HingeEmbedding", neither=int(first.sum()), targets=len(first))
    return None


def _at_hand(values: torch.Tensor | None) -> torch.Tensor | None:
    """Return values that may be looked at: in host memory, not many, and of no class that asks other ranks for them."""
    if values is None or not is_plain(values) or values.device.type != "cpu":
        return None
    return values if 0 < values.numel() <= _MAX_LABELS else None


def _spreads(node: Any) -> Iterator[LossBroadcast]:
    """Yield where predictions, and what they met, were spread over a larger table that the loss averages over."""
    if graph.name_of(node) in _ELEMENTWISE:
        made, target = node.next_functions[0][0], graph.saved_tensor(node, "target")
        if (
            made is not None
            and graph.name_of(made) == "ExpandBackward0"
            and target is not None
            and 0 in target.stride()
        ):
            yield from _spread(node, made, *made.next_functions[0])
    if graph.name_of(node) not in _MEANS:
        return
    for made in _pointwise(node.next_functions[0][0]):
        operands = made.next_functions
        known = [operand for operand in operands if operand[0] is not None]
        if graph.name_of(made) not in _PAIRS or len(known) != 1 or len(operands) < 2:
            continue
        for found in _spread(node, made, *known[0]):
            factors = [t for name in ("self", "other") if (t := graph.saved_tensor(made, name)) is not None]
            if graph.name_of(made) != "MulBackward0" or any([t.numel() < math.prod(found.result) for t in factors]):
                yield found


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
        if graph.name_of(made) in _POINTWISE:
            waiting += list(dict.fromkeys(below for below, _ in made.next_functions))


def _spread(loss: Any, made: Any, prediction: Any, index: int) -> Iterator[LossBroadcast]:
    """Yield both shapes where an operation has spread a prediction, which is one of the results of its node."""
    own = None if prediction is None else graph.shape_at(prediction, index)
    result = None if made is None else graph.shape_at(made)
    if own is not None and result is not None and own != result:
        explicit = graph.name_of(prediction) == "UnsqueezeBackward0"
        yield LossBroadcast(loss=plain_name(graph.name_of(loss)), prediction=own, result=result, explicit=explicit)
