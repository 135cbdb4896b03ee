"""What is seen of a model's forwards: its inputs, and where its graph is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from ddpdebug.probes.recipe.cuts import Cuts
from ddpdebug.probes.recipe.inputs import FORWARDS, Inputs


def look(model: nn.Module, x: torch.Tensor) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    inputs = Inputs(told.append)
    for _ in range(FORWARDS + 2):
        inputs.begin()
        model(x)
        inputs.end()
    assert not hooks._global_forward_pre_hooks  # nothing stays behind
    return told


def test_inputs_are_those_of_the_first_layer_with_weights() -> None:
    """What forward makes of its arguments counts, told once; bytes that were divided twice are recognised."""
    pixels = torch.randint(0, 256, (4, 1, 8, 8)).float()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    (told,) = look(net, pixels / 255 / 255)
    assert (told["layer"], told["twice"]) == ("Linear", 1.0)
    (told,) = look(net, pixels / 255)
    assert told["twice"] == 0
    assert told["max"] == pytest.approx(float(pixels.max()) / 255)
    (told,) = look(net, torch.rand(4, 64) / 300)
    assert told["twice"] == 0


def test_models_that_normalise_by_themselves_are_left_alone() -> None:
    """Behind a normalisation, or of numbers that are no data, nothing is told."""
    assert look(nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 2)), 1e4 * torch.randn(8, 64)) == []
    assert look(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.randint(0, 9, (8, 3))) == []


class Pair(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, 5), nn.Linear(5, 2), between

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        if self.between == "unused":
            return self.two(given)
        return self.two(h.detach().relu() if self.between == "detach" else h)


@pytest.mark.parametrize("between, names", [("detach", ["one.weight", "one.bias"]), ("unused", None), ("", None)])
def test_cut(between: str, names: list[str] | None) -> None:
    """A layer whose output goes on without its graph is named; one whose output is not used is another matter."""
    model, x, given = Pair(between), torch.randn(3, 4), torch.randn(3, 5)
    cuts = Cuts(model, list(model.one.parameters()))
    cuts.begin([x, given])
    model(x, given)
    found = cuts.end()
    assert (found and found["names"]) == names
    cuts.begin([x, given])
    cuts.release()  # the forward has raised
    assert found is None or (found["after"], found["before"]) == ("one", "two")
    assert not hooks._global_forward_hooks
