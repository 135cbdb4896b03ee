"""Labels: range, type and balance, as the loss function gets them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ddpdebug.preflight.observe import LossCall, Seen
from ddpdebug.preflight.output.results import Check, Status, Table

_INDEXED = frozenset({"cross_entropy", "nll_loss"})
_BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
#: Largest against smallest class; the default of SageMaker Debugger's ClassImbalance rule.
_IMBALANCE = 10.0
#: Labels for each class before their counts mean anything: with 30 expected, 3 or fewer are a chance of 1e-9.
_PER_CLASS = 30
#: Beyond that many classes it is a vocabulary, where counts follow Zipf.
_MANY_CLASSES = 100
_LEAST_IN_BATCH = 8


def classes_of(call: LossCall) -> int | None:
    """Return the number of classes of a loss call; None if its targets are no class indices."""
    if call.name not in _INDEXED or call.target.is_floating_point() or not call.prediction.dim():
        return None
    return call.prediction.shape[1 if call.prediction.dim() > 1 else 0]


def kept(call: LossCall) -> Tensor:
    """Return the class indices without those that the loss ignores."""
    target = call.target.detach().flatten()
    return target[target != int(call.settings.get("ignore_index", -100))]


def check(seen: list[Seen]) -> Iterator[Check]:
    """Check range and balance of the labels."""
    calls = [call for s in seen for call in s.calls]
    if not calls:
        yield Check(Status.SKIPPED, "the loss is not computed by a function of torch that names its targets")
        return
    problem = next((p for call in calls if (p := _problem(call)) is not None), None)
    error = next((s.error for s in seen if s.error is not None), None)
    if problem is not None:
        yield Check(
            Status.FAIL,
            problem + (f"; the loss raises {type(error).__name__}" if error else ""),
            code="DATA903",
            hypotheses=("classes counted from 1", "a head with too few outputs", "another label encoding"),
            actions=("compare `target.min(), target.max()` with the number of outputs of the last layer",),
        )
    else:
        names = ", ".join(sorted({call.name for call in calls}))
        yield Check(Status.PASS, f"{sum(call.target.numel() for call in calls)} targets of {names} are in range")
        yield from _balance([s for s in seen if s.calls])


def _problem(call: LossCall) -> str | None:
    target = call.target.detach()
    if not target.numel():
        return None
    classes = classes_of(call)
    if classes is not None:
        labels = kept(call)
        off = labels[(labels < 0) | (labels >= classes)]
        if off.numel():
            return f"{off.numel()} of {target.numel()} labels are outside 0 to {classes - 1}, for example {int(off[0])}"
    elif call.name in _BINARY:
        off = target[(target < 0) | (target > 1)]
        if off.numel():
            return f"{off.numel()} of {target.numel()} targets of {call.name} are outside 0 to 1"
    if target.is_floating_point() and not bool(torch.isfinite(target).all()):
        return f"{int((~torch.isfinite(target)).sum())} of {target.numel()} targets are not finite"
    return None


def _are_tokens(seen: Seen, classes: int) -> bool:
    """Whether the classes are the vocabulary of the model's own inputs: texts have no balance of classes."""
    number = seen.calls[0].target.numel()
    return any(
        not t.is_floating_point() and t.dim() > 1 and t.numel() == number and 1 < int(t.max()) < classes
        for t in seen.inputs
    )


def _balance(seen: list[Seen]) -> Iterator[Check]:
    firsts = [s.calls[0] for s in seen]
    sizes = {classes_of(call) for call in firsts}
    classes = next(iter(sizes))
    if len(sizes) != 1 or classes is None or not 2 <= classes <= _MANY_CLASSES or firsts[0].target.dim() > 1:
        return
    if any(_are_tokens(s, classes) for s in seen):
        return
    batches = [kept(call) for call in firsts]
    counts = torch.bincount(torch.cat(batches), minlength=classes).tolist()
    table = Table(head=("class", "labels"), rows=tuple(enumerate(counts)))
    single = [int(b[0]) for b in batches if b.numel() >= _LEAST_IN_BATCH and len(b.unique()) == 1]
    present = [count for count in counts if count]
    least, most = min(present, default=0), max(counts)
    absent = f", {classes - len(present)} classes have none" if len(present) < classes else ""
    if len(single) == len(batches) >= 3:
        yield Check(
            Status.WARN,
            f"each of {len(batches)} batches has a single class: {', '.join(map(str, single))}",
            name="label balance",
            code="DATA904",
            hypotheses=("the data lie sorted by class and are not shuffled",),
            actions=("shuffle: `DataLoader(shuffle=True)`, or `DistributedSampler(shuffle=True)`",),
            tables=(table,),
        )
    elif sum(counts) >= _PER_CLASS * classes and most > _IMBALANCE * max(1, least):
        yield Check(
            Status.WARN,
            f"the largest class has {most} labels, the smallest {least}, of {sum(counts)}{absent}",
            name="label balance",
            code="DATA907",
            actions=("weight the loss or the sampler by class, and judge by a metric for each class",),
            tables=(table,),
        )
    else:
        summary = f"{len(present)} classes with {least} to {most} labels each in {len(batches)} batches{absent}"
        yield Check(Status.PASS, summary, name="label balance", tables=(table,))
