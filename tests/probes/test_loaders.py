"""Which loader training waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.step_state import Clock
from ddpdebug.schema.announcements import AwaitedLoader, Loader, RepeatedDeliveries


class Items(Dataset[torch.Tensor]):
    """Takes so long for each item, by the clock of the tests."""

    passed = 0.0

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        Items.passed += self.seconds[index % len(self.seconds)]
        return torch.zeros(1)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int | None]]]:
    """What was announced, with its number."""
    told: list[tuple[Any, int | None]] = []

    def announce(announcement: Any, number: int | None = None) -> None:
        told.append((announcement, number))

    monkeypatch.setattr(Clock, "now", lambda _: Items.passed)

    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, announce, lambda *_: False)
    probes.patches.install()
    yield told
    probes.remove()
    probes.release()


def awaited(said: list[tuple[Any, int | None]]) -> list[int]:
    """Return the numbers of the loaders that were told to be waited for."""
    return [announced.loader for announced, _ in said if isinstance(announced, AwaitedLoader)]


def test_the_loader_that_training_waits_for_is_told_once(said: list[tuple[Any, int | None]]) -> None:
    """Of two at a time the slower one, and not that of an evaluation."""
    evaluated, quick, slow, last = (DataLoader(Items(seconds)) for seconds in (0.002, 0.001, 0.02, 0.001))
    with torch.no_grad():
        for _ in evaluated:
            pass
    assert awaited(said) == []
    for _ in zip(quick, slow, strict=True):
        pass
    assert awaited(said) == [2]
    for _ in last:
        pass
    assert awaited(said) == [2, 3]


@pytest.mark.parametrize("seconds", [[0.0014], [*[0.001] * 8, *[0.01] * 8, *[0.001] * 24]])
def test_a_loader_that_is_not_clearly_slower_is_not_told(
    said: list[tuple[Any, int | None]], seconds: list[float]
) -> None:
    """Nor one that is so for a while."""
    first = DataLoader(Items(0.001))
    for _ in first:
        pass
    for _ in zip(first, DataLoader(Items(*seconds)), strict=True):
        pass
    assert awaited(said) == [0]


def test_loaders_that_take_turns_are_told_ever_more_rarely(said: list[tuple[Any, int | None]]) -> None:
    """Each pass waits for the other one."""
    loaders = DataLoader(Items(0.001)), DataLoader(Items(0.001))
    for number in range(20):
        for _ in loaders[number % 2]:
            pass
    assert awaited(said) == [0, 1]


def test_a_new_loader_gets_no_number_of_a_living_one(said: list[tuple[Any, int | None]]) -> None:
    """Also where others are gone; theirs are free again, so that there are never more than loaders."""
    gone, kept = DataLoader(Items(0.001)), DataLoader(Items(0.001))
    for loader in (gone, kept):
        iter(loader)
    del gone, loader
    new, newer = DataLoader(Items(0.001)), DataLoader(Items(0.001))
    for loader in (new, newer, kept):
        iter(loader)
    assert [number for announced, number in said if isinstance(announced, Loader)] == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("indices", "trains", "told"),
    [
        (list(range(5)) * 60, True, [(5, 300)]),
        (list(range(5)) * 60, False, []),  # an evaluation
        (list(range(300)), True, []),
        ([i // 8 for i in range(300)], True, []),  # a group of views of each
    ],
)
def test_a_loader_that_draws_a_few_of_many(
    indices: list[int],
    trains: bool,  # a parameter of a test
    told: list[tuple[int, int]],
) -> None:
    """Told once, of what is trained on."""
    announced: list[Any] = []
    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, lambda fact, number=None: announced.append(fact), lambda *_: False)
    probes.patches.install()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    try:
        for _ in DataLoader(torch.utils.data.TensorDataset(torch.zeros(300)), batch_size=4, sampler=indices):
            weight.grad = torch.ones(1)
            if trains:
                optimizer.step()
    finally:
        probes.remove()
        probes.release()
    found = [fact for fact in announced if isinstance(fact, RepeatedDeliveries) and fact.drawn]
    assert [(fact.different, fact.length) for fact in found] == told
