"""What is seen of a model's forwards: its inputs, and where its graph is cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpdebug.detectors.data.data908_input_scale import InputScale
from ddpdebug.detectors.rcp.rcp810_loss_detached import LossDetached
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.training_loop.detached_parts import Cuts
from ddpdebug.probes.training_loop.input_statistics import FORWARDS, Inputs
from ddpdebug.probes.training_loop.no_grad import LAST, NoGrad

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
ENTRIES = entries_of(GUARD)


def look(model: nn.Module, x: torch.Tensor) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    inputs = Inputs(told.append, ENTRIES)
    for _ in range(FORWARDS + 2):
        inputs.begin(lambda: [x])
        model(x)
        inputs.end()
    assert ENTRIES.calls.idle  # nothing stays behind
    return told


def test_inputs_are_those_of_the_first_layer_with_weights() -> None:
    """What forward makes of its arguments counts, told once; of small ones also how far they are from bytes."""
    pixels = torch.randint(0, 256, (4, 1, 8, 8)).float()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    (told,) = look(net, pixels / 255 / 255)
    assert (told.layer, told.from_bytes) == ("Linear", pytest.approx(0, abs=1e-3))
    (told,) = look(net, pixels / 255)
    assert told.from_bytes is None
    assert told.max == pytest.approx(float(pixels.max()) / 255)
    (told,) = look(net, torch.rand(4, 64) / 300)
    assert told.from_bytes == pytest.approx(0.5, abs=0.1)
    assert [judged(pixels / scale) for scale in (255**2, 255, 50)] == ["divided by 255 twice", None, None]


def judged(x: torch.Tensor) -> str | None:
    """What the rule says of inputs."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    facts = dict.fromkeys(range(2), look(net, x)[0])
    return next((finding.phase for finding in InputScale().compare("inputs:0", facts)), None)


def test_models_that_normalise_by_themselves_are_left_alone() -> None:
    """Behind a normalisation, or of numbers that are no data, nothing is told."""
    assert look(nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 2)), 1e4 * torch.randn(8, 64)) == []
    assert look(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.randint(0, 9, (8, 3))) == []


class Cell(nn.Module):
    """A recurrent cell that begins with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.step, self.out = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = torch.tanh(self.state(h) + self.step(x[:, t]))
        return self.out(h)


def test_a_constant_of_the_models_own_is_no_input() -> None:
    """What comes from outside counts, and is constant where it really is."""
    (told,) = look(Cell(), torch.randn(4, 3, 8))
    assert told.min < 0 < told.max
    (told,) = look(Cell(), torch.ones(4, 3, 8))
    assert told.min == told.max == 1


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
    cuts = Cuts(model, list(model.one.parameters()), ENTRIES)
    cuts.begin([x, given])
    model(x, given)
    found = cuts.end()
    assert (found and list(found.names)) == names
    cuts.begin([x, given])
    cuts.release()  # the forward has raised
    assert found is None or (found.after, found.before) == ("one", "two")
    assert ENTRIES.calls.idle


class Parts(nn.Module):
    """An encoder that may run without gradients in front of a head that trains."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.head = copy.deepcopy(self.encoder) if how == "copy" else nn.Linear(4, 2)
        self.encoder.train(how != "eval")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpoint":
            return self.head(checkpoint(self.encoder, x.requires_grad_(), use_reentrant=True))
        with torch.set_grad_enabled(self.how == "trains"):
            h = self.encoder(x)
        return self.head(self.encoder(x) + h if self.how == "siamese" else h)


def run_parts(how: str) -> dict[str, Any] | None:
    """Train for a few steps as the recipe's probe sees them; return what is found."""
    model = Parts(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = NoGrad(model, ENTRIES)
    for step in range(LAST + 1):
        seen.release() if step else seen.begin()
        model(torch.randn(3, 4)).sum().backward()
        if how == "starts later" and step == LAST:
            model.encoder(torch.randn(3, 4)).sum().backward()
        if how == "average":
            with torch.no_grad():
                next(model.encoder.parameters()).mul_(0.9)
        if step:
            seen.keep()
        else:
            seen.mark(p for p in model.parameters() if p.grad is None)
        optimizer.step()
        optimizer.zero_grad()
    seen.release()
    assert ENTRIES.calls.idle
    return seen.found()


def test_a_part_that_runs_without_gradients_is_named() -> None:
    """The largest module under `no_grad` is told with its parameters and the line that calls it."""
    found = run_parts("cut")
    assert found is not None
    (part,) = found.parts
    assert (part.path, part.in_eval, part.copy_of, part.written) == ("encoder", False, None, False)
    assert part.names == ("encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias")
    assert [finding.code for finding in LossDetached().compare(found.topic, {0: found})] == ["RCP810"]
    file, line = str(part.location).rsplit(":", 1)
    assert file.endswith("test_forward_modes.py")
    assert "h = self.encoder(x)" in Path(__file__).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("how", ["trains", "siamese", "checkpoint", "starts later"])
def test_parts_that_get_gradients(how: str) -> None:
    """A part that gets some in another way, or later, is not told."""
    assert run_parts(how) is None


@pytest.mark.parametrize(
    "how, said", [("copy", ("head", False, False)), ("eval", (None, True, False)), ("average", (None, False, True))]
)
def test_parts_without_gradients_on_purpose(how: str, said: tuple[str | None, bool, bool]) -> None:
    """What speaks for an intention is told, and the rule lets it pass."""
    found = run_parts(how)
    assert found is not None
    assert [(part.copy_of, part.in_eval, part.written) for part in found.parts] == [said]
    assert list(LossDetached().compare(found.topic, {0: found})) == []
