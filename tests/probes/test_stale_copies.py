"""Copies that evaluations use and steps do not: averages are to follow the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpdebug.probes.training_loop.stale_copies import StaleCopies


def evaluate(
    module: nn.Module,
    model: nn.Module,
    steps: list[int],
    between: Callable[[], None] = lambda: None,
    told_by: int | None = None,
) -> list[int]:
    """Return how many evaluations were told; before each, training goes on."""
    copies, told = StaleCopies(3), []
    for step in steps:
        between()
        if said := copies.ran(module, step, [weakref.ref(model)]):
            assert told_by is None or step <= told_by
            told.append(said.forwards)
    return [*told, *(said.forwards for said in copies.at_end())]


def follow(average: nn.Module, model: nn.Module) -> None:
    """Move an average."""
    with torch.no_grad():
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(other + 1, 0.2)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([10, 20, 30, 40, 50], [4]),
        ([10, 10, 20, 20], [2]),  # batches of two evaluations; told at the end
        ([10], []),
        ([10, 11, 12, 13], []),  # a teacher, which each step uses
        ([10, 12, 22, 32], []),
    ],
)
def test_a_copy_that_nothing_changes(steps: list[int], told: list[int]) -> None:
    """Is told once, and not where steps use it."""
    model = nn.Linear(3, 2)
    assert evaluate(copy.deepcopy(model).eval(), model, steps, told_by=40) == told


@pytest.mark.parametrize("trains", [True, False])
def test_a_reference_whose_samples_are_trained_on_takes_part(trains: bool) -> None:
    """A rollout's samples go through the reference once, and through the policy for several steps; some at a time."""
    model = nn.Embedding(20, 2)
    reference, copies = copy.deepcopy(model).eval(), StaleCopies(3)
    for step in range(10, 50, 4):
        tokens = torch.randint(0, 20, (32, 9))
        copies.ran(reference, step, [weakref.ref(model)], lambda tokens=tokens: [tokens[:, :-1]])
        other = tokens if trains else torch.randint(0, 20, (32, 9))
        copies.trains(lambda other=other: [other[8:16, :-1]])
    assert not [*copies.at_end()]
    assert (copies._copies[id(reference)].values is None) is trains


def test_copies_that_change_and_other_models() -> None:
    """An average that follows, the model itself, one in train mode, and one of other shapes."""
    model = nn.Linear(3, 2)
    average = copy.deepcopy(model).eval()
    steps = [10, 20, 30, 40, 50]
    assert evaluate(average, model, steps, lambda: follow(average, model)) == []
    assert evaluate(model.eval(), model, steps) == []
    assert evaluate(copy.deepcopy(model).train(), model, steps) == []
    assert evaluate(nn.Linear(3, 4).eval(), model, steps) == []


def test_an_average_of_a_model_that_is_mostly_frozen() -> None:
    """What is trained follows; what is frozen has nothing to follow."""
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
    model[:5].requires_grad_(False)
    average = copy.deepcopy(model).eval()

    def moves() -> None:
        follow(average[5], model[5])

    assert evaluate(average, model, [10, 20, 30, 40, 50], moves) == []
    assert evaluate(average, model, [10, 20, 30, 40, 50]) == [4]


def test_a_reference_that_is_a_part_of_the_loss() -> None:
    """It runs with gradients in the step after the evaluation that has seen it first; until then it is waited for."""
    model = nn.Linear(3, 2)
    reference, copies = copy.deepcopy(model).eval(), StaleCopies(3)
    assert not copies.waits(10)
    copies.ran(reference, 10, [weakref.ref(model)])
    assert copies.waits(11)
    assert not copies.waits(12)
    copies.takes_part(reference)
    assert not copies.waits(11)
    assert copies.ran(reference, 20, [weakref.ref(model)]) is None
    assert list(copies.at_end()) == []


@pytest.mark.parametrize("updated", [False, True])
def test_an_average_of_torch_that_is_evaluated_once(updated: bool) -> None:
    """It says how often it was updated."""
    model = nn.Linear(3, 2)
    average, copies = AveragedModel(model).eval(), StaleCopies(3)
    for step in (10, 20):  # torch calls the hooks of what is inside first
        copies.ran(average.module, step, [weakref.ref(model)])
        copies.ran(average, step, [weakref.ref(model)])
    assert [said.names for said in copies.at_end()] == [("AveragedModel",)]
    if updated:
        average.update_parameters(model)
    assert evaluate(average, model, [60]) == ([] if updated else [1])
