"""Each check finds its mistake, and is silent where there is none."""

from __future__ import annotations

from collections.abc import Callable

import preflight_cases as cases
import pytest
import torch
from torch import nn
from torch.nn import functional

import ddpdebug
from ddpdebug.preflight.output.results import Check, Status

Make = Callable[[], cases.Training]


def checked(training: cases.Training, group: str, name: str, **settings: object) -> Check:
    result = ddpdebug.preflight(*training, only=[group], **settings)
    return next(check for check in result.checks if check.name == name)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.exp() / output.exp().sum(1, keepdim=True), target)


def numbers(*, column: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x[:, :1] if column else x[:, 0]) for x, _ in cases.data()]


NAN = [(torch.full((64, 12), float("nan")), y) for _, y in cases.data()]
SORTED = [(x, torch.full_like(y, at % 4)) for at, (x, y) in enumerate(cases.data())]
RARE = cases.relabelled(lambda y: torch.where(torch.arange(len(y)) < 4, y, torch.zeros_like(y)))
SHUFFLED = cases.relabelled(lambda y: y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))])
SHIFTED = cases.relabelled(lambda y: y + 1)
SAME = cases.data(1) * 4
REPEATED = [(x[:1].expand(64, 12), y) for x, y in cases.data()]
PIXELS = cases.images(scale=255.0)

FIRES: dict[str, tuple[Make, str, str, Status, str]] = {
    "nan": (lambda: cases.trained(cases.mlp(), NAN), "data", "inputs", Status.FAIL, "NUM305"),
    "labels from 1": (lambda: cases.trained(cases.mlp(), SHIFTED), "data", "labels", Status.FAIL, "DATA903"),
    "sorted": (lambda: cases.trained(cases.mlp(), SORTED), "data", "label balance", Status.WARN, "DATA904"),
    "imbalance": (lambda: cases.trained(cases.mlp(), RARE), "data", "label balance", Status.WARN, "DATA907"),
    "repeated": (lambda: cases.trained(cases.mlp(), REPEATED), "data", "duplicates", Status.WARN, "DATA906"),
    "pixels": (
        lambda: cases.trained(cases.convolutions(), PIXELS), "data", "normalisation", Status.WARN, "DATA908"),
    "divided twice": (
        lambda: cases.trained(cases.convolutions(), cases.images(scale=1 / 255)),
        "data", "normalisation", Status.WARN, "DATA908"),
    "constant": (
        lambda: cases.trained(cases.convolutions(), cases.images(scale=0.0, shift=1.0)),
        "data", "normalisation", Status.WARN, "DATA908"),
    "shuffled labels": (
        lambda: cases.trained(cases.mlp(), SHUFFLED), "data", "labels and inputs", Status.WARN, "DATA909"),
    "head replaced": (
        lambda: cases.without_head(forgotten=True), "parameters", "in the optimizer", Status.FAIL, "RCP803"),
    "model replaced": (
        lambda: cases.of_another_model(other=True), "parameters", "optimizer without model", Status.FAIL, "RCP811"),
    "detached": (
        lambda: cases.trained(cases.Cut(cut=True)), "parameters", "reached by the loss", Status.FAIL, "RCP810"),
    "item": (
        lambda: cases.trained(
            cases.mlp(), loss=lambda o, t: torch.tensor(functional.cross_entropy(o, t).item(), requires_grad=True)
        ),
        "parameters", "reached by the loss", Status.FAIL, "RCP810"),
    "dead branch": (
        lambda: cases.trained(cases.biased(cases.mlp(), -1000.0)),
        "parameters", "zero gradients", Status.WARN, "HLTH714"),
    "plain list": (
        lambda: cases.trained(cases.Hidden(list)), "parameters", "registered", Status.FAIL, "RCP817"),
    "large head": (
        lambda: cases.trained(cases.scaled(cases.mlp(), 8.0)), "initial loss", "value", Status.WARN, "RCP801"),
    "nan loss": (lambda: cases.trained(cases.mlp(), NAN), "initial loss", "value", Status.FAIL, "NUM302"),
    "softmax": (
        lambda: cases.trained(nn.Sequential(cases.mlp(), nn.Softmax(1))),
        "initial loss", "softmax before the loss", Status.FAIL, "RCP802"),
    "own softmax": (
        lambda: cases.trained(cases.mlp(), loss=by_hand),
        "initial loss", "softmax before the loss", Status.FAIL, "RCP802"),
    "nll of logits": (
        lambda: cases.trained(cases.mlp(), loss=functional.nll_loss),
        "initial loss", "softmax before the loss", Status.FAIL, "RCP802"),
    "broadcast": (
        lambda: cases.trained(cases.mlp(outputs=1), numbers(column=False), mse),
        "initial loss", "shapes", Status.FAIL, "RCP819"),
    "own broadcast": (
        lambda: cases.trained(cases.mlp(outputs=1), numbers(column=False), lambda o, t: (o - t).square().mean()),
        "initial loss", "shapes", Status.FAIL, "RCP819"),
    "dead units": (
        lambda: cases.trained(cases.biased(cases.mlp(), -50.0)),
        "initialisation", "dead units", Status.WARN, "HLTH703"),
    "saturated": (
        lambda: cases.trained(cases.scaled(cases.tower(nn.Tanh, depth=2), 30.0)),
        "initialisation", "saturated units", Status.WARN, "HLTH704"),
    "symmetric": (
        lambda: cases.trained(cases.filled(cases.mlp(), 0, 0.1)),
        "initialisation", "symmetric weights", Status.WARN, "HLTH715"),
    "tiny weights": (
        lambda: cases.trained(cases.scaled(cases.mlp(), 1e-3)),
        "initialisation", "scale of the weights", Status.WARN, "HLTH715"),
    "signal dies": (
        lambda: cases.trained(cases.scaled(cases.tower(nn.ReLU, he=True), 0.3)),
        "initialisation", "activations by depth", Status.WARN, "HLTH715"),
    "sigmoid tower": (
        lambda: cases.trained(cases.tower(nn.Sigmoid)), "gradient flow", "gradients by depth", Status.WARN, "HLTH702"),
    "exploding": (
        lambda: cases.trained(cases.scaled(cases.tower(nn.ReLU, he=True), 6.0)),
        "gradient flow", "gradients by depth", Status.WARN, "HLTH701"),
    "eval": (
        lambda: cases.trained(cases.mlp(nn.Dropout(0.1)).eval()), "gradient flow", "train mode", Status.WARN, "RCP804"),
    "dropout in eval": (
        lambda: cases.trained(cases.Dropping(always=True)),
        "gradient flow", "eval mode repeats", Status.WARN, "RCP820"),
    "attention's dropout in eval": (
        lambda: cases.trained(cases.Attention(causal=True, drops=False), cases.tokens(), cases.over_tokens),
        "gradient flow", "eval mode repeats", Status.WARN, "RCP820"),
    "batch leaks": (
        lambda: cases.trained(cases.Mixing(0)), "gradient flow", "samples are independent", Status.WARN, "RCP825"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRES)
def test_fires(name: str) -> None:
    """The check that is there for a mistake finds it, with its code."""
    make, group, check, status, code = FIRES[name]
    found = checked(make(), group, check)
    assert (found.status, found.code) == (status, code), found.summary


HEALTHY: dict[str, Make] = {
    "mlp": lambda: cases.trained(cases.mlp()),
    "dropout": lambda: cases.trained(cases.mlp(nn.Dropout(0.1), nn.LayerNorm(32))),
    "convolutions": lambda: cases.trained(cases.convolutions(), cases.images()),
    "batch norm": lambda: cases.trained(cases.mlp(nn.BatchNorm1d(32))),
    "regression": lambda: cases.trained(cases.mlp(outputs=1), numbers(column=True), mse),
    "own regression": lambda: cases.trained(
        cases.mlp(outputs=1), numbers(column=True), lambda o, t: (o - t).square().mean()
    ),
    "pairs": lambda: cases.trained(
        cases.mlp(outputs=1), loss=lambda o, t: functional.softplus(o[:, 0, None] - o[:, 0]).mean()
    ),
    "log softmax": lambda: cases.trained(nn.Sequential(cases.mlp(), nn.LogSoftmax(1)), loss=functional.nll_loss),
    "head kept": lambda: cases.without_head(forgotten=False),
    "model kept": lambda: cases.of_another_model(other=False),
    "module list": lambda: cases.trained(cases.Hidden(nn.ModuleList)),
    "whole graph": lambda: cases.trained(cases.Cut(cut=False)),
    "features mixed": lambda: cases.trained(cases.Mixing(1)),
    "dropout in training": lambda: cases.trained(cases.Dropping(always=False)),
    "tokens": lambda: cases.trained(cases.Attention(causal=True), cases.tokens(), cases.over_tokens),
    "flat tokens": lambda: cases.trained(cases.Attention(causal=True), cases.texts(), cases.over_flat_tokens),
    "attention's dropout in training": lambda: cases.trained(
        cases.Attention(causal=True, drops=True), cases.tokens(), cases.over_tokens
    ),
    "deep": lambda: cases.trained(cases.tower(nn.ReLU, he=True)),
    "ignored labels": lambda: cases.trained(cases.mlp(), cases.relabelled(lambda y: torch.where(y == 0, -100, y))),
    "zero head": lambda: cases.trained(cases.filled(cases.mlp(), 2, 0.0)),
}
GROUPS = ("data", "parameters", "initial loss", "initialisation", "gradient flow")


@pytest.mark.parametrize("name", HEALTHY)
def test_silent(name: str) -> None:
    """A healthy training passes all of the first half of the checks, and each group says something."""
    result = ddpdebug.preflight(*HEALTHY[name](), only=GROUPS)
    assert {check.group for check in result.checks} == set(GROUPS)
    assert [
        (c.name, c.summary) for c in result.checks if c.status in {Status.FAIL, Status.WARN} or "could not" in c.summary
    ] == []


@pytest.mark.parametrize("causal, status", [(True, Status.PASS), (False, Status.FAIL)])
def test_causality(*, causal: bool, status: Status) -> None:
    """A model without its mask sees the future; nobody is told unless he asks."""
    training = cases.trained(cases.Attention(causal=causal), cases.tokens(), cases.over_tokens)
    assert checked(training, "gradient flow", "causal", causal=True).status is status
    assert all(c.name != "causal" for c in ddpdebug.preflight(*training, only=["gradient flow"]).checks)


def test_an_expectation_that_is_told() -> None:
    """It takes the place of log C."""
    training = cases.trained(cases.mlp())
    assert checked(training, "initial loss", "value", expect_loss=1.4).status is Status.PASS
    assert checked(training, "initial loss", "value", expect_loss=0.1).code == "RCP801"


def test_validation_data() -> None:
    """Shared samples and another scale are seen, a proper split is not."""
    model, loss, optimizer, batches = cases.trained(cases.convolutions(), cases.images())

    def found(validation: list[object]) -> dict[str, Status]:
        result = ddpdebug.preflight(model, loss, optimizer, batches, val_batches=validation, only=["data"])
        return {check.name: check.status for check in result.checks if check.name.startswith("train and")}

    other = [(x.flip(2), y) for x, y in cases.images()]
    overlap, statistics = "train and validation overlap", "train and validation statistics"
    assert found(other) == {overlap: Status.PASS, statistics: Status.PASS}
    assert found(batches)[overlap] is Status.WARN
    assert found([(x * 255, y) for x, y in other])[statistics] is Status.WARN


def test_the_same_batch_again() -> None:
    """From a list it is full-batch training, which is no mistake."""
    assert checked(cases.trained(cases.mlp(), SAME), "data", "duplicates").status is Status.INFO
