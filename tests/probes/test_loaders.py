"""Which loader training waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.schema.announcements import AwaitedLoader


class Items(Dataset[torch.Tensor]):
    """Takes so long for an item."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(1)


@pytest.fixture
def awaited() -> Iterator[list[int]]:
    """The numbers of the loaders that were told."""
    told: list[int] = []

    def announce(announcement: Any, _: int | None = None) -> None:
        if isinstance(announcement, AwaitedLoader):
            told.append(announcement.loader)

    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, announce, lambda *_: False)
    probes.patches.install()
    yield told
    probes.remove()
    probes.release()


def test_the_loader_that_training_waits_for_is_told_once(awaited: list[int]) -> None:
    """Of two at a time the slower one, and not that of an evaluation."""
    evaluated, quick, slow, last = (DataLoader(Items(seconds)) for seconds in (0.002, 0.0, 0.02, 0.0))
    with torch.no_grad():
        for _ in evaluated:
            pass
    assert awaited == []
    for _ in zip(quick, slow, strict=True):
        pass
    assert awaited == [2]
    for _ in last:
        pass
    assert awaited == [2, 3]
