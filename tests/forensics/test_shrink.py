"""Shrinking finds what fails alone, and what fails only together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.forensics.replay.replay import replay
from ddpdebug.forensics.replay.shrink import Shrunk, shrink
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Together(nn.Module):
    """Is non-finite when all samples are equal, or one is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, names: Any = None) -> torch.Tensor:
        marked = (x * self.scale)[x > 100]
        spread = torch.log((marked.numel() - 3 < 0) + 0 * x.sum())
        return x.reciprocal() + spread


def _shrunk(values: Sequence[float], **options: Any) -> Shrunk:
    model, captures = Together(), ForwardCaptures(GUARD)
    x = torch.tensor(values)
    captures.begin(model, (x,), {"names": {"other": torch.zeros(3, 2)}}, 0)
    captures.end(model, model(x))
    capture: ForwardCapture = captures.current[0]
    return shrink(capture, replay(capture), replay, **options)


def test_combination() -> None:
    """Three samples that fail only together are found as one subset."""
    values = [1.0] * 32
    for position in (3, 17, 30):
        values[position] = 200.0
    found = _shrunk(values)
    assert found.subsets == [[3, 17, 30]]
    assert found.reason is None


@pytest.mark.parametrize("guilty", [[0], [31], [4, 5], [0, 15, 16, 31]])
def test_alone(guilty: list[int]) -> None:
    """All samples that fail alone are found."""
    values = [1.0] * 32
    for position in guilty:
        values[position] = 0.0
    assert _shrunk(values).subsets == [[position] for position in guilty]


def test_bounded() -> None:
    """The number of runs is bounded, which is said."""
    found = _shrunk([0.0] * 64, max_runs=10)
    assert (found.runs, found.reason) == (10, "stopped after 10 runs")


def test_nothing_to_do() -> None:
    """A batch that does not fail, or is one sample, is not divided."""
    assert _shrunk([1.0] * 4).reason == "nothing failed"
    assert _shrunk([0.0]).reason == "the inputs have no first dimension to divide"
