"""Weights that are put in for an evaluation: what is left of them is reported, once and after the second time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.probes.training_loop.put_in import PutIn


class _Loop:
    """Training with an evaluation after every third step."""

    def __init__(self, *, frozen: bool = False) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model[0].requires_grad_(not frozen)
        self.put_in, self.steps, self.found = PutIn(), 0, list[Any]()

    def step(self, evaluates: Any = None) -> None:
        """Train for a step, in the way of the probe's events."""
        if fact := self.put_in.trains([self.model], self.steps):
            self.found.append(fact)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
        self.put_in.after_step([self.model])
        self.steps += 1
        if evaluates is not None:
            evaluates()

    def evaluate(self) -> None:
        """Run a forward without gradients."""
        self.put_in.evaluates([self.model], "train.py:9")

    def run(self, evaluates: Any, between: Any = None) -> list[Any]:
        """Return what is found in 13 steps."""
        for number in range(13):
            self.step(evaluates if number % 3 == 2 else between)
        return self.found


def _write(model: nn.Module, of: str = "") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(of):
                parameter.mul_(0.9)


@pytest.mark.parametrize("by", ["values", "data"])
def test_averages_that_stay_are_reported_once(by: str) -> None:
    """At the second evaluation, with the step after the first one."""
    loop = _Loop()

    def evaluates() -> None:
        if by == "values":
            _write(loop.model)
        else:
            for parameter in loop.model.parameters():
                parameter.data = parameter.data * 0.9
        loop.evaluate()
        loop.evaluate()

    (found,) = loop.run(evaluates)
    assert (found.since, found.location, found.frozen) == (3, "train.py:9", False)
    assert set(found.names) <= {name for name, _ in loop.model.named_parameters()}


def test_averages_that_are_taken_out_are_nothing() -> None:
    loop = _Loop()

    def evaluates() -> None:
        kept = copy.deepcopy(loop.model.state_dict())
        _write(loop.model)
        loop.evaluate()
        with torch.no_grad():
            for name, parameter in loop.model.named_parameters():
                parameter.copy_(kept[name])

    assert loop.run(evaluates) == []


def test_weights_that_are_written_between_other_steps_too_are_the_loop_s() -> None:
    """As they are where a script clips them, or averages them every few steps."""
    loop = _Loop()

    def evaluates() -> None:
        _write(loop.model)
        loop.evaluate()

    assert loop.run(evaluates, lambda: _write(loop.model)) == []


def test_what_is_written_after_the_evaluation_is_nothing() -> None:
    """The best weights are loaded, or the next task begins."""
    loop = _Loop()

    def evaluates() -> None:
        loop.evaluate()
        _write(loop.model)

    assert loop.run(evaluates) == []


def test_a_known_load_is_nothing() -> None:
    loop = _Loop()

    def evaluates() -> None:
        _write(loop.model)
        loop.put_in.forget()
        loop.evaluate()

    assert loop.run(evaluates) == []


def test_frozen_weights_that_stay_changed_are_said_to_be_frozen() -> None:
    loop = _Loop(frozen=True)

    def evaluates() -> None:
        _write(loop.model, "0.")
        loop.evaluate()

    (found,) = loop.run(evaluates)
    assert found.frozen
    assert set(found.names) <= {"0.weight", "0.bias"}


def test_a_loop_that_evaluates_after_each_step_says_nothing() -> None:
    """Whether it writes the weights in any case cannot be told."""
    loop = _Loop()

    def evaluates() -> None:
        _write(loop.model)
        loop.evaluate()

    assert loop.run(evaluates, evaluates) == []


def test_another_model_is_not_compared_with_the_one_before() -> None:
    """Folds of a cross-validation, each of which begins with an evaluation."""
    loop = _Loop()
    for seed in range(4):
        torch.manual_seed(seed)
        loop.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        loop.evaluate()
        for _ in range(4):
            loop.step()
    assert loop.found == []
