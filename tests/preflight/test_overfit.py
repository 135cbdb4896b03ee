"""Overfitting one batch: who can, who cannot, and how it shows."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from preflight_subjects import adam, batches, cross_entropy, network, sgd, state_of, subject
from torch import nn

from ddpdebug.preflight.checks.overfit import Shape, check, shape_of
from ddpdebug.preflight.output.results import Check, Status

DRAW = random.Random(2)


@pytest.mark.parametrize(
    "losses, shape",
    [
        ([2.3 * 0.9**i for i in range(40)], Shape.LEARNED),
        ([-1.0 - 0.1 * i for i in range(40)], Shape.LEARNED),
        ([0.0] + [-0.01 * i for i in range(40)], Shape.LEARNED),
        ([5.0 - 0.04 * i for i in range(40)], Shape.FALLING),
        ([6.2 - 0.01 * i for i in range(25)], Shape.FALLING),
        ([2.3 + DRAW.gauss(0, 1e-4) for _ in range(40)], Shape.STUCK),
        ([2.3 - 1e-4 * i for i in range(40)], Shape.STUCK),
        ([1.5 + 0.8 * 0.7**i for i in range(60)], Shape.PLATEAU),
        ([0.5 + 1.8 * 0.7**i for i in range(60)], Shape.FLOOR),
        ([2.3, *[1.2 + 0.6 * (i % 2) for i in range(40)]], Shape.OSCILLATING),
        ([2.3 + 0.2 * i for i in range(40)], Shape.WORSE),
        ([-2.3 + 0.2 * i for i in range(40)], Shape.WORSE),
        ([2.3, 2.0, math.nan], Shape.NONFINITE),
        ([2.3, math.inf], Shape.NONFINITE),
        ([], Shape.NONFINITE),
    ],
)
def test_curves_are_told_apart(losses: list[float], shape: Shape) -> None:
    """By how they end, how much they moved and how they swing."""
    assert shape_of(losses) is shape


def softmax_first(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0]).softmax(1)
    return F.cross_entropy(out, batch[1]), out


def smoothed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1], label_smoothing=0.05), out


def of_two_classes(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0])[:, :2]
    return F.cross_entropy(out, batch[1] % 2, label_smoothing=0.3), out


def soft(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0])
    return F.binary_cross_entropy_with_logits(out, 0.3 + 0.4 * F.one_hot(batch[1], out.shape[1])), out


def with_a_bonus(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0])
    entropy = torch.distributions.Categorical(logits=out).entropy().mean()
    return F.cross_entropy(out, batch[1]) - 1.5 * entropy + 3, out


def variational(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0])
    mean, log = out[:, :2], out[:, 2:4]
    made = F.pad(mean + torch.randn_like(mean) * (0.5 * log).exp(), (0, batch[0].shape[1] - 2))
    return F.mse_loss(made, batch[0]) + 0.5 * (mean**2 + log.exp() - 1 - log).mean(), out


def cut(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0]).argmax(1)
    return (out != batch[1]).float().mean(), out


def detached(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(batch[0]).detach().requires_grad_()
    return F.cross_entropy(out, batch[1]), out


def noisy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    out = model(F.dropout(batch[0], 0.4) + torch.randn_like(batch[0]) * 3 * random.random())
    return F.cross_entropy(out, batch[1]), out


def other_parameters(_: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network().parameters(), lr=0.1)


HALF = [(x, torch.randint(5, y.shape, generator=torch.Generator().manual_seed(3))) for x, y in batches()]
SAME_INPUT = [(torch.ones_like(x), y) for x, y in batches()]


@pytest.mark.parametrize(
    "changes, status, words",
    [
        ({}, Status.PASS, "memorised"),
        ({"optimizer_for": None}, Status.PASS, "Adam, 0.01: memorised"),
        ({"optimizer_for": sgd(0.0)}, Status.PASS, "Adam, 0.01: memorised"),  # the loop sets its rate by hand
        ({"model": network(nn.Dropout(0.6), nn.ReLU())}, Status.PASS, "memorised"),
        ({"loss_of": noisy, "optimizer_for": adam(0.01)}, Status.PASS, "memorised"),
        ({"batches": HALF, "optimizer_for": adam(0.03)}, Status.PASS, "memorised"),
        ({"optimizer_for": sgd(1e-6)}, Status.WARN, "stuck at the initial value; Adam, 0.01, goes 1.694 to"),
        ({"optimizer_for": other_parameters}, Status.WARN, "the model can, the recipe cannot"),
        ({"optimizer_for": sgd(1e30)}, Status.FAIL, "not finite; Adam, 0.01, goes"),
        ({"loss_of": smoothed, "optimizer_for": adam(0.03)}, Status.PASS, "memorised"),
        ({"loss_of": of_two_classes, "optimizer_for": adam(0.03)}, Status.PASS, "memorised"),
        ({"loss_of": soft, "optimizer_for": adam(0.03)}, Status.PASS, "memorised"),
        ({"loss_of": with_a_bonus, "optimizer_for": adam(0.03)}, Status.INFO, "may be its floor (it has terms beside"),
        ({"loss_of": variational, "optimizer_for": adam(0.03)}, Status.INFO, "may be its floor (it has terms beside"),
        ({"loss_of": softmax_first}, Status.WARN, "plateau; Adam does not help"),
        ({"batches": SAME_INPUT}, Status.WARN, "plateau; Adam does not help"),
        ({"loss_of": detached}, Status.FAIL, "stuck at the initial value; Adam does not help"),
        ({"loss_of": lambda m, b: (cross_entropy(m, b)[0] / 0, None)}, Status.FAIL, "not finite; Adam does not help"),
        ({"model": network().requires_grad_(False)}, Status.FAIL, "no parameter of the model is trainable"),
        ({"loss_of": cut}, Status.FAIL, "the loss depends on no parameter that is trainable"),
        ({"batches": []}, Status.SKIPPED, "there are no batches"),
    ],
)
def test_a_batch_is_memorised_or_the_reason_is_named(changes: dict[str, Any], status: Status, words: str) -> None:
    """Dropout and noise are held, random labels can be learned; caps, wrong optimizers and cut graphs cannot."""
    given = subject(**changes)
    before = state_of(given)
    (found,) = check(given, seconds=100)
    assert words in found.summary
    assert found.status is status
    assert state_of(given) == before
    bad = status in {Status.WARN, Status.FAIL}
    assert bool(found.code) is bool(found.hypotheses) is bool(found.actions) is bad
    assert found.code in {"", "RCP814"} or changes == {"loss_of": cut}


def test_a_slow_model_is_not_judged_by_a_few_steps() -> None:
    """The summary says how long the check would need; a fast one keeps to its time."""

    def slow(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.05)
        return cross_entropy(model, batch)

    (found,) = check(subject(loss_of=slow, optimizer_for=sgd(1e-6)), seconds=0.3)
    assert found.status is Status.SKIPPED
    assert "allow" in found.summary


def curve_names(found: Check) -> list[str]:
    return [series.name for series in found.plots[0].series]


def test_all_attempts_are_drawn_and_listed() -> None:
    """One line and one row for each."""
    (found,) = check(subject(loss_of=detached), seconds=100)
    assert curve_names(found) == ["the script's optimizer", "Adam, 0.001", "Adam, 0.01", "Adam, 0.0001"]
    assert [row[0] for row in found.tables[0].rows] == curve_names(found)
