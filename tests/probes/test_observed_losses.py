"""Losses that the user tells reach the row of the step that they belong to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ddpdebug
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.loop_calls import LoopCalls
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.schema.row import Flag, decode

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def observed(*told: tuple[str, Any]) -> Any:
    """Return the row of a step in which the user told these losses."""
    state = StepState()
    calls = LoopCalls(Bus(Guard(lambda *_: None)), state, lambda topic, value: None)
    for name, value in told:
        calls.observed(name, value)
    return decode(encode_row(StepRecord(0, 0, Flag(0), state.since), 0, GUARD))


def test_validation_losses_are_averaged() -> None:
    """Numbers and tensors, as many as were told since the last step; the training loss is another field."""
    row = observed(("val_loss", 1.0), ("val_loss", torch.tensor(3.0, requires_grad=True)), ("loss", 7.0))
    assert row.val_loss == 2.0
    assert row.loss == 7.0


def test_nothing_told_is_unknown() -> None:
    """NaN, as for every number that was not measured."""
    assert math.isnan(observed().val_loss)
    assert math.isnan(observed(("loss", 7.0)).val_loss)


def test_telling_without_a_monitor_does_nothing() -> None:
    """A script may tell whether or not it is watched."""
    ddpdebug.observe(val_loss=1.0)
    assert "observe" in ddpdebug.__all__


def test_unknown_names_are_refused() -> None:
    """With the valid ones."""
    from ddpdebug.config.settings import Config
    from ddpdebug.monitor.monitor import Monitor

    with pytest.raises(ValueError, match="'loss' and 'val_loss'"):
        Monitor(Config()).observe(validation=1.0)
