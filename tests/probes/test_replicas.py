"""When copies of the model are looked for."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import replicas
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.optimizers import living_modules, module_census
from ddpdebug.probes.replicas import Replicas

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Net(nn.Sequential):
    """A class of its own, so that what other tests leave behind does not count."""


class Owner:
    """Stands for the wrapper of a DDP."""

    def __init__(self, module: nn.Module) -> None:
        self.ref = lambda: module


def test_living_modules_are_found_among_all_objects() -> None:
    """Of every class that is a module's."""
    net = Net(nn.Linear(2, 2))
    found = {id(module) for module in living_modules()}
    assert {id(net), id(net[0])} <= found
    assert all(isinstance(module, nn.Module) for module in living_modules())


def test_a_new_module_shows_in_the_census() -> None:
    """And nothing else does: neither a forward nor a look."""
    net = Net(nn.Linear(2, 2))
    before = module_census()
    living_modules()
    assert module_census() == before
    twin = copy.deepcopy(net)
    assert module_census() != before
    del twin


def test_copies_made_between_two_searches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no module has come there is no search, whatever step it is."""
    walks: list[int] = []

    def walk() -> list[nn.Module]:
        walks.append(1)
        return [module for module in living_modules() if isinstance(module, Net)]

    monkeypatch.setattr(replicas, "living_modules", walk)
    model, seen = Net(nn.Linear(2, 2)), Replicas(entries_of(GUARD))
    seen.search(0, [Owner(model)], [])  # type: ignore[list-item]
    seen.search(16, [Owner(model)], [])  # type: ignore[list-item]
    assert (len(walks), list(seen.look())) == (1, [])
    average = copy.deepcopy(model)
    seen.search(17, [Owner(model)], [])  # type: ignore[list-item]
    assert len(walks) == 1
    seen.search(256, [Owner(model)], [])  # type: ignore[list-item]
    assert (len(walks), list(seen.look())) == (2, ["Net"])
    del average
