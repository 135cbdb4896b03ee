"""Mistakes that people make with checkpoints, each said plainly; and what is no mistake is not said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ddpdebug

State = dict[str, Any]


class Tied(nn.Module):
    """A model whose last layer has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        out: torch.Tensor = self.head(x)
        return out


def trained(steps: int = 3) -> tuple[State, State, State]:
    """Return weights, their average, and the state of the optimizer."""
    torch.manual_seed(0)
    model = Tied()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    return model.state_dict(), average.state_dict(), optimizer.state_dict()


def said(a: State, b: State) -> str:
    """Return the text of a comparison that finds a difference, which reads the same as JSON."""
    found = ddpdebug.compare_states(a, b)
    assert not found.equal
    assert found.to_json()["equal"] is False
    text = found.text()
    assert all(remark in text for remark in found.to_json()["remarks"])
    return text


def test_keys_that_were_not_loaded() -> None:
    """A layer whose names did not match (`strict=False`) kept what it was initialised with."""
    weights, _, _ = trained()
    old = {name.replace("layers.1.", "blocks.1."): value for name, value in weights.items()}
    torch.manual_seed(1)
    model = Tied()
    model.load_state_dict(old, strict=False)
    text = said(weights, model.state_dict())
    assert "different: 2 of 8 entries differ" in text
    assert "2 entries differ by the norm of the values or more, as unrelated values do: not loaded on one side" in text
    assert "layers.1.weight  36 of 36 elements differ" in text
    text = said(old, model.state_dict())
    assert "2 only in A, 2 only in B" in text


def test_an_average_in_the_place_of_the_weights() -> None:
    """Known by its place in the other file, and suspected where it stands nowhere."""
    weights, average, _ = trained()
    both = {"model": weights, "ema": average}
    for text in (said(both, {"model": average}), said(both, {"model": average, "ema": average}), said(both, average)):
        assert "under another name" in text
        assert "one side has an average (EMA) in the place of the weights" in text
    text = said(weights, average)
    assert "all 8 tensors of floating point numbers differ, by " in text
    assert "as after other steps, or in an average (EMA) of the weights" in text
    assert "unrelated" not in text


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "model."])
def test_a_prefix(prefix: str) -> None:
    """It is no difference, and said."""
    weights, _, _ = trained()
    found = ddpdebug.compare_states(weights, {prefix + name: value for name, value in weights.items()})
    assert found.equal
    for part in prefix.split(".")[:-1]:
        assert f"B's names have `{part}.` in 8 entries, A's do not: compared without it" in str(found)
    prefixed = {prefix + name: value + (name == "layers.0.bias") for name, value in weights.items()}
    (one,) = ddpdebug.compare_states(weights, prefixed).differences
    assert (one.name, one.name_b) == ("layers.0.bias", f"{prefix}layers.0.bias")


def test_tied_weights_that_were_saved_once() -> None:
    """As safetensors does."""
    weights, _, _ = trained()
    once = {name: value for name, value in weights.items() if name != "head.weight"}
    text = said(weights, once)
    assert "`head.weight` has the values of `embed.weight`, which B has: tied weights, saved twice in A" in text
    assert "the 7 that both have are equal, 1 only in A" in text
    assert "saved twice in B and once in A" in said(once, weights)


def test_copies_of_another_precision() -> None:
    """In another dtype, with one element that is more than rounding, and rounded but stored as before."""
    weights, _, _ = trained()
    half = {name: value.bfloat16() for name, value in weights.items()}
    text = said(weights, half)
    assert "8 entries are float32 in A and bfloat16 in B, and equal but for the rounding" in text
    half["layers.2.weight"][1, 4] = 3.0
    text = said(weights, half)
    assert "1 entry is float32 in A and bfloat16 in B, and differs after rounding, too" in text
    assert "1 of 36 elements differs after rounding, first at [1, 4]: A" in text
    text = said(weights, {name: value.bfloat16().float() for name, value in weights.items()})
    assert "8 entries of B are A's rounded to bfloat16, in the same dtype as before: precision was lost" in text
    assert "EMA" not in text


def test_an_optimizer_whose_parameters_were_in_another_order() -> None:
    """Its moments belong to other parameters then, which have the same shape by chance."""
    _, _, state = trained()
    other = copy.deepcopy(state)
    other["state"] = {i: state["state"][j] for i, j in enumerate([0, 3, 4, 5, 6, 1, 2])}
    text = said(state, other)
    assert "12 entries of A have their values in B under another name, `state." in text
    assert "the same names with other numbers, another order of parameters or layers" in text


def test_what_is_all_alike_is_nobody_elses() -> None:
    """Zeros and ones are found everywhere."""
    a = {"x": torch.zeros(4), "y": torch.ones(4), "z": torch.randn(4)}
    b = {"x": torch.ones(4), "y": torch.zeros(4), "z": a["z"]}
    assert "under another name" not in said(a, b)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s.update(step=torch.tensor(4)), "kind       step  A 4, B int64 []"),
        (lambda s: s.update(lr=0.2), "value      lr  A 0.1, B 0.2"),
        (lambda s: s.update(w=torch.zeros(3, 2)), "shape      w  A float32 [2, 3], B float32 [3, 2]"),
        (lambda s: s.pop("lr"), "only in A  lr  0.1"),
        (lambda s: s["w"].mul_(-1), "equal as numbers: the sign of 0"),
        (lambda s: s["w"].fill_(float("inf")), "6 NaN or infinite"),
        (lambda s: s["n"].add_(1), "1 of 1 element differs, first at []: A 5, B 6"),
    ],
)
def test_kinds_of_differences(change: Callable[[State], object], words: str) -> None:
    """What a line says of one entry."""
    a = {"w": torch.zeros(2, 3), "lr": 0.1, "step": 4, "n": torch.tensor(5)}
    b = copy.deepcopy(a)
    change(b)
    assert words in said(a, b)


def test_many_lines_are_cut() -> None:
    """The worst come first, and JSON has them all."""
    a = {f"w{i}": torch.ones(3) for i in range(30)}
    b = {name: value * (1 + i / 100) for i, (name, value) in enumerate(a.items())}
    found = ddpdebug.compare_states(a, b)
    lines = found.text(5).splitlines()
    assert lines[-1] == "  and 24 more lines"
    assert [line.split()[1] for line in lines if line.startswith("  elements")] == ["w29", "w28", "w27", "w26", "w25"]
    assert len(found.to_json()["differences"]) == 29
