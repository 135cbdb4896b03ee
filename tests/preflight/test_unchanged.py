"""The preflight leaves no trace in what it is given, nor in the process."""

from __future__ import annotations

import copy
import random
import signal
from typing import Any

import preflight_cases as cases
import pytest
import torch
from torch import nn
from torch.nn import functional

import ddpdebug
from ddpdebug.errors import UsageError
from ddpdebug.preflight.examine import examine
from ddpdebug.preflight.output.results import GROUPS, Status
from ddpdebug.preflight.sandbox.time_limit import TimeUp, time_limit
from ddpdebug.preflight.subject import Subject

numpy = pytest.importorskip("numpy")


def state(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> list[Any]:
    """Everything that the caller could notice, as values that can be compared."""
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
        [id(p) for p in model.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        copy.deepcopy(optimizer.state_dict()),
        loader.generator.get_state(),
        dict(vars(loader)).keys(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,  # one of the tests runs down
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_the_caller_keeps_everything() -> None:
    """Model, gradients, optimizer, loader and random state are bit for bit as before, also where dropout draws."""
    model = cases.mlp(nn.BatchNorm1d(32), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = (torch.cat(parts) for parts in zip(*cases.data(4), strict=True))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    before = state(model, optimizer, loader)
    result = ddpdebug.preflight(model, functional.cross_entropy, optimizer, loader)
    assert same(before, state(model, optimizer, loader))
    assert {check.group for check in result.checks} == set(GROUPS)
    assert [f"{c.group}: {c.summary}" for c in result.checks if "could not be done" in c.summary] == []


def test_state_is_compared() -> None:
    """The comparison sees a single changed bit."""
    model = cases.mlp()
    optimizer, loader = cases.sgd(model), torch.utils.data.DataLoader([1], generator=torch.Generator())
    before = state(model, optimizer, loader)
    with torch.no_grad():
        model[0].weight[0, 0].nextafter_(torch.tensor(9.0))
    assert not same(before, state(model, optimizer, loader))


def test_a_model_that_fails_is_no_traceback() -> None:
    """Its groups say what was raised and where."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("no such feature")

    result = ddpdebug.preflight(*cases.trained(Fails()), only=["gradient flow", "initial loss"])
    assert {check.status for check in result.checks} <= {Status.SKIPPED, Status.FAIL, Status.PASS}
    assert any("KeyError: 'no such feature'" in check.summary for check in result.checks)
    assert any("test_unchanged.py:" in check.summary for check in result.checks if check.status is Status.SKIPPED)


def test_without_a_loss_the_rest_is_checked() -> None:
    """A script whose loss cannot be recorded still has parameters."""
    subject = Subject(
        model=cases.mlp(),
        loss_of=lambda model, batch: (torch.zeros(()), None),
        optimizer_for=None,
        batches=[],
        facts={"not_recorded": "it is computed elsewhere"},
    )
    checks = examine(subject, ["parameters", "initial loss"])
    assert [c.summary for c in checks if c.group == "initial loss"] == [
        "the loss could not be recorded: it is computed elsewhere"
    ]
    assert next(c for c in checks if c.name == "table").summary.startswith("4 parameters with")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"only": ["overfitt"]}, "unknown group 'overfitt'; did you mean overfit?"),
        ({"batches": []}, "at least one batch"),
        ({"model": 3}, "needs a torch.nn.Module as model, not int"),
        ({"epochs": 3}, "unknown setting 'epochs'; valid are causal,"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    """With what is valid."""
    model, loss, optimizer, batches = cases.trained(cases.mlp())
    arguments: dict[str, Any] = {"model": model, "loss_fn": loss, "optimizer": optimizer, "batches": batches}
    with pytest.raises(UsageError) as caught:
        ddpdebug.preflight(**{**arguments, **change})
    assert message in str(caught.value)


def test_a_loss_of_model_and_batch() -> None:
    """A loss function that takes the model is recognised by its first parameter, or by the caller's word."""

    def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def other_name(learner: nn.Module, batch: Any) -> torch.Tensor:
        return by_name(learner, batch)

    training = cases.trained(cases.mlp(), loss=by_name)
    value = next(c for c in ddpdebug.preflight(*training, only=["initial loss"]).checks if c.name == "value")
    assert value.status is Status.PASS
    training = cases.trained(cases.mlp(), loss=other_name)
    result = ddpdebug.preflight(*training, only=["initial loss"], with_model=True)
    assert value.summary == next(c for c in result.checks if c.name == "value").summary


def endless() -> None:
    with time_limit(0.05):
        while True:
            torch.zeros(3).sum()


def test_a_check_that_takes_too_long_ends() -> None:
    """With an exception in it, where nobody else uses the alarm; the alarm is free again."""
    running = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with pytest.raises(TimeUp, match="took more than"):
            endless()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *running)
