"""A generator that a data set holds is found where workers would draw from copies of it, and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from ddpdebug.probes.copied_generators import copied_generator


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.rng: Any = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.rng.normal(size=3)


class NoisyByAMethod(Noisy):
    def __getitem__(self, index: int) -> Any:
        return self._noise()

    def _noise(self) -> list[float]:
        return [float(self.rng.random()) for _ in range(3)]


class OfItsWorker(Noisy):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            self.rng = np.random.default_rng(index)
        return self.rng.normal(size=3)


class OfTheItem(Noisy):
    def __getitem__(self, index: int) -> Any:
        self.rng.manual_seed(index)
        return torch.randn(3, generator=self.rng)


class OnlyForTheOrder(Noisy):
    def __getitem__(self, index: int) -> Any:
        return index

    def shuffled(self) -> Any:
        return self.rng.permutation(8)


class Shift:
    def __init__(self) -> None:
        self.source = random.Random(3)

    def __call__(self, x: float) -> float:
        return x + self.source.random()


class Transformed(OnlyForTheOrder):
    def __init__(self) -> None:
        self.rng = None
        self.transforms = [Shift()]


@pytest.mark.parametrize(
    ("data", "name"), [(Noisy, "Noisy.rng"), (NoisyByAMethod, "NoisyByAMethod.rng"), (Transformed, "Shift.source")]
)
def test_a_generator_that_items_are_drawn_from_is_found(data: type[Dataset[Any]], name: str) -> None:
    for dataset in (data(), Subset(data(), [1, 2])):
        found = copied_generator(DataLoader(dataset, num_workers=2))
        assert found is not None
        assert found.name == name
        assert "test_copied_generators.py:" in found.location


@pytest.mark.parametrize("data", [OfItsWorker, OfTheItem, OnlyForTheOrder])
def test_one_that_is_set_in_the_worker_or_not_drawn_from_is_not(data: type[Dataset[Any]]) -> None:
    assert copied_generator(DataLoader(data(), num_workers=2)) is None


def test_a_function_that_prepares_each_worker_may_set_it() -> None:
    assert copied_generator(DataLoader(Noisy(), num_workers=2, worker_init_fn=lambda worker: None)) is None
