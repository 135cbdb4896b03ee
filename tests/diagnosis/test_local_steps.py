"""What trains apart is local SGD, a mistake, or something of its own beside the model."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.detectors.examples import step_at
from ddpdebug.diagnosis.local_steps import LocalSteps
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_APART: dict[int, Any] = {rank: {"foreign_grads_digest": 50 + rank, "grads_digest": 60 + rank} for rank in range(4)}


def _reduced(number: int) -> Step:
    return step_at(number)


def _beside(number: int) -> Step:
    return step_at(number, optimizer=1, flags=Flag.NO_DDP, odd=_APART)


@pytest.fixture
def local() -> LocalSteps:
    return LocalSteps({})


def _read(local: LocalSteps, *steps: Step) -> None:
    for step in steps:
        local.read(step)


def test_a_block_behind_the_training_is_beside_it(local: LocalSteps) -> None:
    _read(local, _reduced(0), _reduced(1), _beside(1), _beside(2))
    assert local.undecided(_beside(2))
    assert local.is_beside(1)


def test_steps_that_take_turns_are_of_one_training(local: LocalSteps) -> None:
    _read(local, _reduced(0), _beside(0), _reduced(1), _beside(1))
    assert not local.is_beside(1)


def test_a_second_stage_is_a_training_though_few_of_its_steps_are_checked(local: LocalSteps) -> None:
    _read(local, _reduced(0), _reduced(1), *map(_beside, range(2, 300, 20)))
    assert local.undecided(_beside(300))
    assert not local.is_beside(1)


def test_a_training_without_any_ddp_is_beside_nothing(local: LocalSteps) -> None:
    _read(local, _beside(0), _beside(1))
    assert not local.is_beside(1)


def test_what_is_dropped_was_no_mistake(local: LocalSteps) -> None:
    _read(local, _reduced(0), *map(_beside, range(100)))
    assert local.parted(1)
    assert local.drop(1)
    assert not local.parted(1)


def test_its_last_steps_may_come_after_the_news(local: LocalSteps) -> None:
    assert not local.drop(1)
    _read(local, _reduced(0), *map(_beside, range(100)))
    assert not local.parted(1)


def _island(number: int, **more: Any) -> Step:
    odd = {rank: {"class_0_key": 11 + rank % 2, "class_0_grads": 7 + rank, **more} for rank in range(4)}
    return step_at(number, flags=Flag.NO_DDP | Flag.SHARDED, grads_digest=0, odd=odd)


def test_islands_of_shards_may_be_averaged_yet(local: LocalSteps) -> None:
    _read(local, _island(0))
    assert local.undecided(_island(0))
    _read(local, step_at(1, flags=Flag.NO_DDP | Flag.SHARDED | Flag.LOCAL_ONLY, grads_digest=0))
    assert not local.undecided(_island(2))
    assert local.marked(_island(2)).any(Flag.LOCAL_ONLY)


def test_islands_that_never_are_have_parted(local: LocalSteps) -> None:
    _read(local, *map(_island, range(100)))
    assert local.parted(0)


def test_a_parameter_that_all_ranks_share_is_no_island(local: LocalSteps) -> None:
    odd = {rank: {"class_0_key": 11, "class_0_grads": 7 + rank} for rank in range(4)}
    step = step_at(0, flags=Flag.NO_DDP | Flag.SHARDED, grads_digest=0, odd=odd)
    _read(local, step)
    assert not local.undecided(step)
