"""When copies of the model are looked for."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.built import Built
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.replicas import Replicas
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Net(nn.Sequential):
    """A class of its own, so that what other tests leave behind does not count."""


class Owner:
    """Stands for the wrapper of a DDP."""

    def __init__(self, module: nn.Module) -> None:
        self.ref = lambda: module


def test_modules_are_noted_as_they_are_built() -> None:
    """By their parameters and children, and as copies and out of a file; nothing is kept alive."""
    entries = entries_of(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    built = entries.built
    entries.on_parts("probe:built", built.has_part)
    entries.patch(nn.Module, "__setstate__", after=[("probe:built", lambda _, module, *__: built.module(module))])
    try:
        net = Net(nn.Linear(2, 2))
        twin = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    finally:
        entries.close()
    late = Net(nn.Linear(2, 2))
    assert {id(m) for m in built.modules} == {id(m) for m in (net, net[0], twin, twin[0], loaded, loaded[0])}
    assert built.roots([*loaded.parameters()]) == [loaded]
    assert built.names([twin[0].bias]) == {id(twin[0].bias): "0.bias"}
    assert built.modules_seen == 6
    gone = weakref.ref(net)
    del net
    assert gone() is None
    built.look_around()
    assert {id(late), id(late[0])} <= {id(m) for m in built.modules}


def test_the_table_does_not_grow_with_modules_that_are_gone() -> None:
    """A job may build one for each step."""
    built = Built()
    for _ in range(5000):
        built.module(nn.Identity())
    kept = [nn.Identity() for _ in range(3000)]
    for module in kept:
        built.module(module)
    assert built.modules == kept
    assert len(built._modules) < 2 * len(kept) + 1024


def test_copies_made_between_two_searches_are_found() -> None:
    """Where no module has come there is no search, whatever step it is."""
    entries = entries_of(GUARD)
    model, seen = Net(nn.Linear(2, 2)), Replicas(Bus(GUARD), StepState(), GUARD)
    entries.built.module(model)
    seen.search(0, [Owner(model)], [])  # type: ignore[list-item]
    seen.search(16, [Owner(model)], [])  # type: ignore[list-item]
    assert list(seen.look()) == []
    average = copy.deepcopy(model)
    entries.built.module(average)
    seen.search(17, [Owner(model)], [])  # type: ignore[list-item]
    assert list(seen.look()) == []
    seen.search(256, [Owner(model)], [])  # type: ignore[list-item]
    assert list(seen.look()) == ["Net"]
    del average
