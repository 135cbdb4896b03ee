"""Statistics of one forward and backward by layer, in the order of the calls: activations, gradients, dead units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.observe import moments
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

#: Layers that mix their inputs by a weight, and whose output an initialisation is made for.
WEIGHTED = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_RECTIFIED = frozenset({"relu", "relu_", "relu6", "threshold"})
_SATURATING = frozenset({"tanh", "tanh_", "sigmoid", "sigmoid_", "softsign"})
#: A unit passes on less than a twentieth of its gradient beyond these values of tanh and sigmoid.
_TANH = 0.975
_SIGMOID = 0.0127


@dataclass(slots=True)
class Layer:
    """A layer: the standard deviation of its output, and that of the loss's gradient at the output."""

    name: str
    spread: float
    gradient: float = 0.0


@dataclass(slots=True)
class Pass:
    """The layer statistics of one forward and backward.

    Args:
        layers: those with a weight, once each, in the order of their first call.
        dead: by nonlinearity, which units were 0 for every sample.
        saturated: by nonlinearity, the share of saturated values.
    """

    layers: list[Layer] = field(default_factory=list)
    dead: dict[str, Tensor] = field(default_factory=dict)
    saturated: dict[str, float] = field(default_factory=dict)


class _Nonlinearities(TorchFunctionMode):
    """A mode that reads the results of relu, tanh and sigmoid, wherever in the model they are called."""

    def __init__(self, result: Pass) -> None:
        super().__init__()
        self._result = result
        self.inside: list[str] = []
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", ""))
        if self.inside and isinstance(value, Tensor) and value.dim() > 1 and name in _RECTIFIED | _SATURATING:
            self._count += 1
            key = f"{name.rstrip('_')} {self._count} in {self.inside[-1] or 'the model'}"
            if name in _RECTIFIED:
                self._result.dead[key] = _dead(value.detach())
            else:
                self._result.saturated[key] = _saturated(value.detach(), name.rstrip("_"))
        return value


def one_pass(subject: Subject, batch: Any) -> Pass:
    """Run a batch forward and backward through a copy of the model, and return its statistics."""
    model, result = copied(subject.model), Pass()
    mode = _Nonlinearities(result)
    outputs: dict[str, Tensor] = {}

    def enter(name: str, *_: Any) -> None:
        mode.inside.append(name)

    def leave(name: str, module: nn.Module, output: Any) -> None:
        mode.inside.pop()
        if isinstance(module, WEIGHTED) and isinstance(output, Tensor) and name not in outputs:
            outputs[name] = output
            if output.requires_grad:
                output.retain_grad()

    with looking(dict(model.named_modules()), before=enter, after=leave), mode:
        loss = subject.loss_of(model, batch)[0]
    if loss.requires_grad:
        loss.backward()
    for name, output in outputs.items():
        gradient = output.grad
        # of a gradient, whose mean is no offset, the deviation is nearly its size
        result.layers.append(Layer(name, moments(output)[1], 0.0 if gradient is None else moments(gradient)[1]))
    return result


def _dead(values: Tensor) -> Tensor:
    """Return a mask of shape (units,) of those that are 0 for all samples and places.

    Units are the channels of (N, C, H, W), and the last dimension of (N, ..., units).
    """
    unit = 1 if values.dim() >= 4 else values.dim() - 1
    return (values == 0).transpose(unit, -1).flatten(0, -2).all(0)


def _saturated(values: Tensor, name: str) -> float:
    sigmoid = name == "sigmoid"
    beyond = (values < _SIGMOID) | (values > 1 - _SIGMOID) if sigmoid else values.abs() > _TANH
    return float(beyond.double().mean())


def sampled(subject: Subject, count: int) -> list[Pass]:
    """Return the statistics of the first batches, each with the initial model and the same random state."""
    passes = []
    for batch in subject.recorded(count):
        torch.manual_seed(0)
        passes.append(one_pass(subject, batch))
    return passes
