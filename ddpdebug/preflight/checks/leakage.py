"""Leakage: outputs that depend on other samples of the batch, on later positions, or in eval mode on random numbers.

Measured by changing the one and comparing the other, in eval mode: batch statistics mix samples on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpdebug.isolation.process_state import Autocast
from ddpdebug.nested import mapped, tensors_in_objects
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.observe import observe
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

#: Relative change of an output that another kernel or order of summation may cause, and in units of its type's epsilon.
_ROUNDING, _EPSILONS = 1e-4, 8
_RANDOM = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})

_ATTENTION = "scaled_dot_product_attention"
_SWITCH = (
    "pass `training=self.training` to `F.dropout`",
    "pass `dropout_p=self.dropout if self.training else 0.0` to `F.scaled_dot_product_attention`",
)


class _Call:
    """The first call of the model in a batch's loss, to be made again with other inputs."""

    def __init__(self, subject: Subject) -> None:
        self.model = copied(subject.model)
        self.args: Any = None
        self.kwargs: Any = None
        self.module: nn.Module = self.model
        self._cast = Autocast.now("cpu")
        with torch.no_grad(), looking(dict(self.model.named_modules()), before=self._note):
            seen = observe(subject, subject.batches[0], self.model)
        self.target = seen.calls[0].target if seen.calls else None
        self.model.eval()

    def _note(self, _: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.args is None:
            self.module, self.args, self.kwargs = module, args, kwargs
            self._cast = Autocast.now(next((t.device.type for t in self.inputs), "cpu"))

    def run(self, change: Any = None, seed: int = 0) -> list[Tensor]:
        """Return the tensors that the model returns for the inputs, after `change` of each."""
        torch.manual_seed(seed)
        args, kwargs = mapped((self.args, self.kwargs), lambda item: self._changed(item, change), kinds=True)
        with torch.no_grad(), self._cast.again(cache=True):
            return list(tensors_in_objects(self.module(*args, **kwargs)))

    def _changed(self, item: Any, change: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return item.clone() if change is None else change(item.clone())

    @property
    def inputs(self) -> list[Tensor]:
        return list(tensors_in_objects((self.args, self.kwargs)))


def check(subject: Subject) -> Iterator[Check]:
    """Check first for randomness in eval mode, which makes the other checks impossible."""
    call = _Call(subject)
    if call.args is None:
        return
    with _Dropouts() as dropouts:
        base = call.run(seed=0)
    other = call.run(seed=1)
    random = any(_apart(a, b) for a, b in zip(base, other, strict=False))
    forgotten = random and dropouts.active > 0
    yield Check(
        Status.WARN if forgotten else Status.INFO if random else Status.PASS,
        "in eval mode the outputs change from call to call: a dropout function, or attention's, is switched on"
        if forgotten
        else "in eval mode the outputs change from call to call: the model samples"
        if random
        else "in eval mode the same batch gives the same outputs",
        code="RCP820" if forgotten else "",
        actions=_SWITCH if forgotten else (),
    )
    yield _batch(subject, call, base, call.run(seed=0))
    if subject.settings.get("causal"):
        yield _future(call, base)


def _batch(subject: Subject, call: _Call, base: list[Tensor], again: list[Tensor]) -> Check:
    size, why = _samples(subject, call)
    # (N, N) are similarities between the samples of the batch
    outputs = [at for at, t in enumerate(base) if t.dim() and t.shape[0] == size > 1 and size not in t.shape[1:]]
    if any(_apart(a, b) for a, b in zip(base, again, strict=False)):
        why = "the outputs are not the same even from one seed"
    if why or not outputs:
        summary = why or "the model's outputs do not count the samples in their first dimension"
        return Check(Status.SKIPPED, summary, name="samples are independent")
    changed = call.run(lambda tensor: _replace_first(tensor, size))
    leaks = [at for at in outputs if _apart(base[at][1:], changed[at][1:])]
    return Check(
        Status.WARN if leaks else Status.PASS,
        "another first sample changes the outputs of the other samples, in eval mode"
        if leaks
        else f"another first sample leaves the outputs of the {size - 1} other samples as they are",
        name="samples are independent",
        code="RCP825",
        hypotheses=(
            "view or reshape where transpose or permute is meant",
            "a softmax, norm or attention over the batch dimension (batch_first=False)",
        ),
        actions=("follow the shapes through the forward",),
    )


def _samples(subject: Subject, call: _Call) -> tuple[int, str]:
    """Return how many samples the inputs count in their first dimension, and why that is not known."""
    sizes = {tensor.shape[0] for tensor in call.inputs if tensor.dim()}
    if len(sizes) != 1:
        return 0, "the inputs have different first dimensions (a graph?), which need not count samples"
    size = next(iter(sizes))
    if _constant(subject):
        return 0, "all batches are the same: the first dimension may be the nodes of one graph"
    sequence = any(getattr(module, "batch_first", True) is False for module in call.model.modules())
    single = call.target is not None and call.target.dim() == 1 and len(call.target) == size
    known = {loader["batch_size"] for loader in subject.facts.get("loaders", ()) if loader["trains"]}
    if sequence and not single and size not in known:
        return 0, "with batch_first=False the first dimension may be time"
    return size, ""


def _constant(subject: Subject) -> bool:
    """Whether the model is given the same in the first two batches."""
    if len(subject.batches) < 2:
        return False
    with torch.no_grad():
        one, other = (observe(subject, batch).inputs for batch in subject.batches[:2])
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=False))


def _replace_first(tensor: Tensor, size: int) -> Tensor:
    """Put another sample's values, turned round, in the place of the first sample."""
    if tensor.dim() and tensor.shape[0] == size:
        other = tensor[-1]
        tensor[0] = other.flip(-1) if other.dim() else other
        if tensor.is_floating_point():
            tensor[0] = tensor[0] * 0.5 + 0.25
    return tensor


def _future(call: _Call, base: list[Tensor]) -> Check:
    first = next((t for t in call.inputs if t.dim() >= 2 and t.shape[1] > 1), None)
    outputs = (
        [] if first is None else [at for at, t in enumerate(base) if t.dim() >= 2 and t.shape[:2] == first.shape[:2]]
    )
    if first is None or not outputs:
        summary = "inputs and outputs do not have the same positions in their second dimension"
        return Check(Status.SKIPPED, summary, name="causal")
    middle = first.shape[1] // 2

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() >= 2 and tensor.shape[:2] == first.shape[:2] and tensor.dtype is not torch.bool:
            tensor[:, middle:] = tensor[:, :middle].flip(1)[:, :1] if tensor.dim() == 2 else -tensor[:, middle:]
        return tensor

    changed = call.run(change)
    leaks = any(_apart(base[at][:, :middle], changed[at][:, :middle]) for at in outputs)
    return Check(
        Status.FAIL if leaks else Status.PASS,
        f"other tokens from position {middle} on "
        + ("change the outputs before it" if leaks else "leave the outputs before it as they are"),
        name="causal",
        code="RCP821",
        hypotheses=("the causal mask is missing, or inverted", "a norm or pooling over all positions"),
        actions=("`is_causal=True`, or a mask that is True where attention is forbidden",),
    )


class _Dropouts(TorchFunctionMode):
    """Counts dropout functions that are active."""

    def __init__(self) -> None:
        super().__init__()
        self.active = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM:
            training = kwargs.get("training", args[2] if len(args) > 2 else True)
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            self.active += bool(training) and share > 0
        elif getattr(func, "__name__", "") == _ATTENTION:
            self.active += kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
        return func(*args, **kwargs)


def _apart(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    limit = max(_ROUNDING, _EPSILONS * torch.finfo(one.dtype).eps)
    size = float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
    difference = (one - other).abs().nan_to_num(0, 0, 0)
    return one.numel() > 0 and float(difference.max()) > limit * max(size, 1e-12)
