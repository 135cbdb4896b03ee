"""A step by which an optimizer only makes its state is none of the training's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.followed import Followed
from ddpdebug.probes.step_state import StepState


@pytest.fixture
def state() -> StepState:
    return StepState()


@pytest.fixture
def followed(state: StepState) -> Followed:
    return Followed(state, Guard(lambda part, message: pytest.fail(f"{part}: {message}")))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_the_step_of_a_state_dict_is_passed_over(followed: Followed, state: StepState, rate: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(followed.fills_state(optimizer)))
    get_optimizer_state_dict(model, optimizer)
    state.since.micro_batches = 1
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert seen == [True, False]


def test_a_warm_up_from_zero_is_a_step(followed: Followed, state: StepState) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.0)
    state.since.micro_batches = 1
    assert not followed.fills_state(optimizer)


def test_a_rate_of_one_group_is_a_step(followed: Followed) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.0}, {"params": [nn.Parameter(torch.ones(2))]}]
    assert not followed.fills_state(torch.optim.Adam(groups, lr=0.1))
