"""One computation of a batch's loss, observed: the model's inputs and output, and the calls of loss functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpdebug.errors import UsageError
from ddpdebug.nested import tensors_in_objects
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

#: Batches that are looked at.
BATCHES = 8
#: Functions of torch that compare a prediction with a target.
LOSSES = frozenset(
    {
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "poisson_nll_loss",
    }
)
_SQUASHING = frozenset({"softmax", "log_softmax", "sigmoid", "logsigmoid"})
_DIFFERENCES = frozenset({"sub", "__sub__", "rsub", "__rsub__", "subtract"})
#: What hands values on as they are, or nearly.
_PASSING = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "contiguous"),
        *("to", "float", "double", "half", "bfloat16", "clone", "__getitem__", "clamp", "t", "cat", "stack", "type_as"),
        *("narrow", "select", "index_select", "clip", "movedim", "swapaxes"),
    }
)


@dataclass(slots=True, kw_only=True)
class LossCall:
    """A call of a loss function; `squashed` names a softmax or sigmoid that was applied to the prediction before."""

    name: str
    prediction: Tensor
    target: Tensor
    settings: dict[str, Any]
    value: Tensor | None = None
    squashed: str | None = None

    @property
    def reduction(self) -> str:
        """The reduction of element losses: `mean`, `sum` or `none`."""
        return str(self.settings.get("reduction", "mean"))


@dataclass(slots=True, kw_only=True)
class Seen:
    """The record of one loss: its calls of loss functions, the model's inputs and output, an error."""

    loss: Tensor | None
    output: Any
    calls: list[LossCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # of the model's first call
    broadcasts: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def scalar(self) -> Tensor:
        """The computed loss; raises the recorded error if there is none."""
        if self.loss is None:
            raise self.error or UsageError("the loss function returned nothing")
        return self.loss


class _Watcher(TorchFunctionMode):
    """Follows what has passed a softmax, and notes the calls of loss functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []
        self.broadcasts: list[tuple[str, list[int], list[int]]] = []
        self._squashed: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        call = self._loss(name, args, kwargs) if name in LOSSES else None
        result = func(*args, **kwargs)
        if call is not None:
            call.value = result
        elif isinstance(result, Tensor):
            self._follow(name, args, result)
        return result

    def _loss(self, name: str, args: Any, kwargs: Any) -> LossCall | None:
        """Note a call before it is made: what it is given is worth knowing where it fails."""
        taken = dict(zip(("input", "target"), args, strict=False)) | kwargs
        prediction, target = taken.pop("input", None), taken.pop("target", None)
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
            return None
        squashed = self._squashed.get(id(prediction), (None, None))[1]
        call = LossCall(name=name, prediction=prediction, target=target, settings=taken, squashed=squashed)
        self.calls.append(call)
        return call

    def _follow(self, name: str, args: Any, result: Tensor) -> None:
        if name in _SQUASHING:
            self._squashed[id(result)] = (result, name)
        elif name in _PASSING:
            before = next((self._squashed[id(t)] for t in tensors_in_objects(args) if id(t) in self._squashed), None)
            if before is not None:
                self._squashed[id(result)] = (result, before[1])
        elif name in _DIFFERENCES and all(isinstance(t, Tensor) for t in args[:2]) and not _of_one_tensor(*args[:2]):
            self.broadcasts.append((name, list(args[0].shape), list(args[1].shape)))


def _of_one_tensor(one: Tensor, other: Tensor | None = None) -> bool:
    """Whether both are views of one tensor: every sample with every other one of it is meant so."""
    try:
        return other is None or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True  # no memory of its own to compare


def observe(subject: Subject, batch: Any, model: nn.Module | None = None) -> Seen:
    """Compute the loss of a batch, with a fresh copy of the subject's model unless another is given.

    What is raised on the way is in the result, beside what was seen until then.
    """
    model = copied(subject.model) if model is None else model
    watcher = _Watcher()
    loss, output, trouble = None, None, None
    with first_inputs(model) as inputs, watcher:
        try:
            loss, output = subject.loss_of(model, batch)
        except Exception as error:  # noqa: BLE001 - the caller's code
            trouble = error
    return Seen(
        loss=loss if isinstance(loss, Tensor) else None,
        output=output,
        calls=watcher.calls,
        inputs=inputs,
        broadcasts=watcher.broadcasts,
        error=trouble,
    )


def observe_all(subject: Subject) -> list[Seen]:
    """Compute the losses of the batches without gradients."""
    batches = subject.recorded(BATCHES)
    with torch.no_grad():
        return [observe(subject, batch) for batch in batches]


@contextmanager
def first_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that is filled with the input tensors of the first call of the model or of a part of it."""
    found: list[Tensor] = []

    def note(_: str, __: nn.Module, args: Any, kwargs: Any) -> None:
        if not found:
            found.extend(tensors_in_objects((args, kwargs)))

    with looking(dict(model.named_modules()), before=note):
        yield found


def moments(values: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of the elements; 0 as deviation of one element, NaN as mean of none."""
    flat = values.detach().double()
    return float(flat.mean()), float(flat.std()) if flat.numel() > 1 else 0.0


def floating(values: list[Tensor]) -> list[Tensor]:
    """Return the tensors of a floating dtype (half precision and float64 among them)."""
    return [tensor for tensor in values if tensor.is_floating_point()]


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradient of each trainable parameter, dense and of its shape; None if the loss does not depend on it.

    Args:
        loss: one number.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not loss.requires_grad:
        return dict.fromkeys((name for name, _ in named), None)
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {
        name: None if g is None else g.to_dense() if g.is_sparse else g
        for (name, _), g in zip(named, found, strict=True)
    }
