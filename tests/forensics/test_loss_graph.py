"""The operation that spoiled a loss is named from its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpdebug.forensics.loss.loss_graph import explain_loss
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))

_LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str | None]] = {
    "log of a softmax": (lambda o: -(torch.softmax(o * 1e4, -1) + 0).log().mean(), "LogBackward0"),
    "division by a count": (lambda o: (o * (o > 1e9)).sum() / (o > 1e9).sum(), "DivBackward0"),
    "nothing counted": (lambda o: functional.cross_entropy(o, torch.tensor([-100, -100])), "NllLossBackward0"),
    "mean of nothing": (lambda o: o[o > 1e9].mean() * 2, "MeanBackward0"),
    "exp": (lambda o: (o.abs() * 1e6).exp().mean(), "ExpBackward0"),
    "power": (lambda o: (o * 0).pow(-2).sum() + 1, "PowBackward0"),
    "reciprocal": (lambda o: 1 / (o * 0).sum(), "ReciprocalBackward0"),
    "the first of two": (lambda o: ((o * 0).log() * 2).exp().log().sum(), "LogBackward0"),
    "NaN among the targets": (lambda o: functional.mse_loss(o, o.detach() * float("nan")), "MseLossBackward0"),
    "a sum that overflows": (lambda o: (o * 1e38).sum() * o.mean(), "SumBackward0"),
    "a mask, and then nothing": (
        lambda o: o.masked_fill(o > 2, -torch.inf).logsumexp(0).sum() + o[o > 1e9].mean(),
        "MeanBackward0",
    ),
    "sums without reduction": (
        lambda o: functional.cross_entropy(o, torch.tensor([1, 2]), reduction="none").sum() / (o * 0).sum(),
        "DivBackward0",
    ),
    "finite": (lambda o: functional.cross_entropy(o, torch.tensor([1, 2])), None),
}


@pytest.mark.parametrize("case", _LOSSES)
def test_loss(case: str) -> None:
    """The first bad operation after the model is found, and nothing in a healthy loss."""
    make, node = _LOSSES[case]
    torch.manual_seed(0)
    model, captures, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), ForwardCaptures(GUARD), torch.randn(2, 4)
    captures.begin(model, (x,), {}, 0)
    output = model(x)
    captures.end(model, output)
    found = explain_loss(make(output), captures.current[0].after)
    if node is None:
        assert found is None
    else:
        assert found is not None
        assert found["node"] == node
        assert found["operands"] or node == "SumBackward0"
        assert bool(found.get("brought")) == (case == "NaN among the targets")


def test_the_model_is_left_out() -> None:
    """What the model itself made is not the loss expression's fault."""

    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * 0).log()

    model, captures, x = Bad(4, 4), ForwardCaptures(GUARD), torch.randn(2, 4)
    captures.begin(model, (x,), {}, 0)
    output = model(x)
    captures.end(model, output)
    assert explain_loss(output.sum(), captures.current[0].after) is None
