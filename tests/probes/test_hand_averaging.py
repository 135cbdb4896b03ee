"""Averages by hand are known by the shapes that the script's collectives carry between a step and the next backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.hand_averaging import HandAveraging
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardBegan, Bus, StepEnded

_SHAPES = ((8, 8), (8,))


def _optimizer(shapes: tuple[tuple[int, ...], ...] = _SHAPES) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes], 0.1)


class _Script:
    def __init__(self, *, outer: torch.optim.Optimizer | None = None) -> None:
        self._bus = Bus(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
        self._state = StepState(world=2)
        if outer is not None:
            loose: Any = SimpleNamespace(is_loose=True, optimizers=lambda: [outer])
            self._state.watches.append(loose)
        self.probe = HandAveraging(self._bus, self._state)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._bus.emit(StepEnded(optimizer))

    def goes_on(self) -> bool:
        self._bus.emit(BackwardBegan(()))
        return self._state.averages


def test_all_parameters_are_carried() -> None:
    script, optimizer = _Script(), _optimizer()
    script.steps(optimizer)
    for shape in _SHAPES:
        script.probe.carries("all_reduce", torch.zeros(shape))
    assert script.goes_on()


@pytest.mark.parametrize("operation", ["all_gather_into_tensor", "all_gather", "reduce_scatter_tensor"])
def test_what_gathers_parts_is_no_average(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdebug.torch_internals.any_distributed", lambda _: True)
    script, optimizer = _Script(), _optimizer()
    script.steps(optimizer)
    script.probe.carries(operation, torch.zeros(72))
    assert not script.goes_on()
    script.steps(optimizer)
    script.probe.carries("all_reduce", torch.zeros(72))
    assert script.goes_on()


def test_an_outer_optimizer_steps_what_is_carried() -> None:
    outer, inner = _optimizer(), _optimizer()
    script = _Script(outer=outer)
    script.steps(inner)
    for shape in _SHAPES:
        script.probe.carries("all_reduce", torch.zeros(shape))
    script.steps(outer)
    assert script.goes_on()


def test_a_step_of_another_model_is_none_of_its_own() -> None:
    script, inner = _Script(), _optimizer()
    script.steps(inner)
    for shape in _SHAPES:
        script.probe.carries("all_reduce", torch.zeros(shape))
    script.steps(_optimizer())  # of which the gradients were averaged
    assert not script.goes_on()
