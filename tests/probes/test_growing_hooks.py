"""Hooks that become more with each step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ddpdebug.probes.training_loop.growing_hooks import GrowingHooks
from ddpdebug.schema.announcements import GrowingHooks as Grown


def _keep(*_: object) -> None:
    pass


class Keeper:
    """Registers a method."""

    def keep(self, *_: object) -> None:
        """Keep nothing."""


def _run(register: object, steps: int, *, remove: bool = False, every: int = 1) -> list[Grown]:
    model, probe, found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), GrowingHooks(), []
    for step in range(steps):
        handle = register(model) if step % every == 0 else None  # type: ignore[operator]
        if remove and handle is not None:
            handle.remove()
        found += [grown for grown in (probe.look([model], step),) if grown is not None]
    return found


@pytest.mark.parametrize(
    ("register", "function"),
    [
        (lambda model: model[1].register_forward_hook(lambda *_: None), "<lambda>"),
        (lambda model: model[1].register_forward_pre_hook(partial(_keep, 1)), "_keep"),
        (lambda model: model[1].register_full_backward_hook(Keeper().keep), "Keeper.keep"),
        (lambda model: model[1].weight.register_hook(_keep), "_keep"),
    ],
)
def test_a_hook_in_each_step_is_told_once_with_its_function(register: object, function: str) -> None:
    (found,) = _run(register, 80)
    assert (found.module, found.since, found.step, found.number) == ("1", 0, 16, 17)
    assert found.function.endswith(function)
    assert "test_growing_hooks.py:" in str(found.location)


def test_what_is_removed_or_rare_or_of_many_functions_is_no_growth() -> None:
    kinds = [type(f"K{i}", (), {"__call__": lambda self, *_: None}) for i in range(80)]
    assert not _run(lambda model: model[0].register_forward_hook(_keep), 80, remove=True)
    assert not _run(lambda model: model[0].register_forward_hook(_keep), 80, every=20)
    assert not _run(lambda model: model[0].register_forward_hook(kinds.pop()()), 80)


def test_hooks_that_are_all_there_from_the_start_are_no_growth() -> None:
    model, probe = nn.Linear(2, 2), GrowingHooks()
    for _ in range(40):
        model.register_forward_hook(_keep)
    assert not [grown for step in range(80) if (grown := probe.look([model], step)) is not None]


def test_an_empty_model_has_none() -> None:
    assert GrowingHooks().look([nn.Identity()], 2) is None
    assert torch.is_grad_enabled()
