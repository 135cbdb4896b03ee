"""The models of one process that no DDP wraps."""

from __future__ import annotations

from torch import nn

from ddpdebug.probes.plain_models import PlainModels
from ddpdebug.probes.step_state import StepState


def test_models_that_are_gone_are_forgotten_and_their_numbers_are_not_used_again() -> None:
    """A sweep makes one after the other."""
    state = StepState()
    models = PlainModels(state)
    for number in range(4):
        model = nn.Linear(2, 2)
        assert models.index(model) is None
        state.follow(model)
        assert models.index(model) == number
        assert [known.index for known in models.living()] == [number]
        del model
    assert models.living() == []


def test_where_several_ranks_train_there_are_none() -> None:
    """Other rules look at what they hold."""
    state, model = StepState(world=2), nn.Linear(2, 2)
    state.follow(model)
    assert PlainModels(state).living() == []
