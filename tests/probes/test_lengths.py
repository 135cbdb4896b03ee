"""Lengths are known without a call of a user's `__len__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddpdebug.probes.lengths import batches_of, length_of

SIZE = 7


class Rows(Dataset[Any]):
    """Holds rows of every kind."""

    size = 4

    def __init__(self) -> None:
        self.rows, self.number = list(range(10)), 5
        self.tensor, self.array, self.columns = torch.ones(6, 2), np.ones((8, 2)), {"x": [1, 2]}

    @property
    def asked(self) -> int:
        pytest.fail("a property has run")


class OfAList(Rows):
    """As most do."""

    def __len__(self) -> int:
        """Return it."""
        return len(self.rows)


class OfANumber(Rows):
    def __len__(self) -> int:
        return self.number


class OfTheClass(Rows):
    def __len__(self) -> int:
        return self.size


class OfAGlobal(Rows):
    def __len__(self) -> int:
        return SIZE


class OfAConstant(Rows):
    def __len__(self) -> int:
        return 12


class OfAShape(Rows):
    def __len__(self) -> int:
        return self.tensor.shape[0]


class OfASize(Rows):
    def __len__(self) -> int:
        return self.tensor.size(0)


class OfAnArray(Rows):
    def __len__(self) -> int:
        return self.array.shape[0] // 2


class OfAColumn(Rows):
    def __len__(self) -> int:
        return len(self.columns["x"]) + 1


class Asking(Rows):
    def __len__(self) -> int:
        return self.asked


class Counting(Rows):
    calls = 0

    def __len__(self) -> int:
        Counting.calls += 1
        return 3


class Making(Rows):
    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            pytest.fail("an attribute was asked for")
        return object.__getattribute__(self, name)

    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (OfAList, 10),
        (OfANumber, 5),
        (OfTheClass, 4),
        (OfAGlobal, 7),
        (OfAConstant, 12),
        (OfAShape, 6),
        (OfASize, 6),
        (OfAnArray, 4),
        (OfAColumn, 3),
        (Asking, None),
        (Counting, None),
    ],
)
def test_what_a_method_would_return(kind: type[Rows], length: int | None) -> None:
    """What only reads, counts and calculates is read from its code; nothing else runs."""
    assert length_of(kind()) == length
    assert Counting.calls == 0


def test_an_object_that_makes_its_attributes_is_not_asked() -> None:
    """Its length is not known."""
    rows = object.__new__(Making)
    vars_of_it = object.__getattribute__(rows, "__dict__")
    vars_of_it["rows"] = [1]
    assert length_of(rows) is None


def test_torchs_own_data_sets() -> None:
    """They are read the same way."""
    rows = OfAList()
    assert length_of(TensorDataset(torch.ones(4, 2))) == 4
    assert length_of(Subset(rows, [1, 2, 3])) == 3
    assert length_of(ConcatDataset([rows, rows])) == 20


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {},
        {"drop_last": True},
        {"sampler": SubsetRandomSampler([1, 2, 3, 4])},
        {"sampler": WeightedRandomSampler([1.0] * 5, 9)},
        {"sampler": RandomSampler(OfAList(), replacement=True, num_samples=4)},
        {"sampler": DistributedSampler(OfAList(), 3, 0)},
    ],
)
def test_batches_are_counted_as_the_loader_would(options: dict[str, Any]) -> None:
    """For each of torch's samplers."""
    loader = DataLoader(OfAList(), batch_size=3, **options)
    assert batches_of(loader) == len(loader)
