"""Whether the epochs of a run draw the same random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpdebug.probes.training_loop.repeated_numbers import Epochs


@pytest.mark.parametrize(
    ("seeds", "draws", "told"),
    [
        ([7, 7, 7, 7], True, 1),
        ([7, 8, 9, 10], True, 0),
        ([7, 7, 8, 8], True, 0),
        ([None, None, None, None], True, 0),
        ([7, 7, 7, 7], False, 0),  # the loader alone draws, a seed for its workers
    ],
)
def test_epochs_that_begin_in_one_state(seeds: list[int | None], draws: bool, told: int) -> None:
    """Three in a row, told once, where training draws from it."""
    model, epochs, found = nn.Linear(2, 2), Epochs(), []
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for seed in seeds:
            if seed is not None:
                torch.manual_seed(seed)
            found.append(epochs.begins(model))
            torch.rand(1)
            for _ in range(3):
                epochs.before_step(model)
                if draws:
                    torch.rand(3)
    facts = [fact for fact in found if fact is not None]
    assert len(facts) == told
    assert [fact.epochs for fact in facts] == [3][:told]


def test_folds_that_begin_alike() -> None:
    """Each with an optimizer of its own: they are to be compared."""
    model, epochs = nn.Linear(2, 2), Epochs()
    with torch.random.fork_rng():
        for _ in range(4):
            torch.manual_seed(1)
            epochs.forget()
            assert epochs.begins(model) is None
            for _ in range(2):
                epochs.before_step(model)
                torch.rand(3)


@pytest.mark.parametrize(
    ("seed", "draws", "told"), [(True, True, [4]), (False, True, []), (True, False, []), (False, False, [])]
)
def test_steps_that_draw_the_same(seed: bool, draws: bool, told: list[int]) -> None:
    """Four in a row, told once."""
    model, epochs, found = nn.Linear(2, 2), Epochs(), []
    with torch.random.fork_rng():
        for _ in range(10):
            if seed:
                torch.manual_seed(1)
            epochs.forward(model)
            if draws:
                torch.rand(3)
            found.append(epochs.backward_begins(model))
            epochs.backward_ends(model)
    assert [fact.steps for fact in found if fact is not None] == told


@pytest.mark.parametrize(("rate", "keeps", "drawn"), [(0.5, False, True), (0.5, True, False), (0.0, False, False)])
def test_a_backward_that_draws(rate: float, keeps: bool, drawn: bool) -> None:
    """What is computed again is to be what it was; numbers of a model without dropout are another matter."""
    block, epochs = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)), Epochs()
    epochs.forward(block)
    out = checkpoint(block, torch.ones(2, 4), use_reentrant=False, preserve_rng_state=keeps)
    epochs.backward_begins(block)
    out.sum().backward()
    assert epochs.backward_ends(block) == drawn
