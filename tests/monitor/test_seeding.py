"""`seed_everything`: the same model on all ranks, other data on each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ddpdebug
from ddpdebug.monitor.seeding import WORKSPACE


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put generators and settings back."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(WORKSPACE, "x")
    monkeypatch.delenv(WORKSPACE)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global generator
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])  # noqa: NPY002 - as above
    torch.set_rng_state(states[2])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    torch.use_deterministic_algorithms(mode=False)


def drawn() -> tuple[float, float, float]:
    """Return a number of each generator."""
    return float(torch.rand(1)), random.random(), float(numpy.random.rand())  # noqa: NPY002 - the global generator


def test_the_same_seed_and_rank_draw_the_same() -> None:
    """Another seed draws other numbers everywhere, another rank only where data is made."""
    ddpdebug.seed_everything(7, rank=1)
    first = drawn()
    ddpdebug.seed_everything(7, rank=1)
    assert drawn() == first
    ddpdebug.seed_everything(8, rank=1)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))
    ddpdebug.seed_everything(7, rank=0)
    torch_number, *others = drawn()
    assert torch_number == first[0]
    assert all(a != b for a, b in zip(others, first[1:], strict=True))


def test_ranks_of_neighbouring_seeds_do_not_meet() -> None:
    """Rank 1 of seed 0 is not rank 0 of seed 1, as it would be if the rank were added."""
    seeds = {ddpdebug.seed_everything(seed, rank=rank).data_seed for seed in range(8) for rank in range(8)}
    assert len(seeds) == 64


def test_the_rank_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is given; without a launcher it is 0."""
    assert ddpdebug.seed_everything(1).rank == 0
    monkeypatch.setenv("RANK", "3")
    assert ddpdebug.seed_everything(1).rank == 3
    assert ddpdebug.seed_everything(1).data_seed == ddpdebug.seed_everything(1, rank=3).data_seed


def test_torch_differs_by_rank_once_separated() -> None:
    """So that dropout masks do."""

    def mask(rank: int) -> torch.Tensor:
        seeds = ddpdebug.seed_everything(5, rank=rank)
        model = torch.nn.Linear(4, 4)
        seeds.separate()
        return torch.cat([model.weight.detach().flatten(), torch.rand(16)])

    zero, one = mask(0), mask(1)
    assert torch.equal(zero[:16], one[:16])
    assert not torch.equal(zero[16:], one[16:])


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return list(drawn())


def test_workers_are_seeded_through_the_generator() -> None:
    """The same samples with the same seed, others on another rank, in a worker process."""

    def samples(rank: int) -> list[list[float]]:
        generator = ddpdebug.seed_everything(5, rank=rank).generator()
        loader = DataLoader(Noise(), batch_size=None, num_workers=1, generator=generator)
        return [list(map(float, sample)) for sample in loader]

    assert samples(0) == samples(0)
    assert all(a != b for x, y in zip(samples(0), samples(1), strict=True) for a, b in zip(x, y, strict=True))


def test_deterministic_mode_says_what_it_costs() -> None:
    """And sets what it says; without it nothing but seeds is touched."""
    plain = ddpdebug.seed_everything(1)
    assert plain.costs == ()
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ
    seeds = ddpdebug.seed_everything(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
    assert os.environ[WORKSPACE] == ":4096:8"
    assert any("raise" in cost for cost in seeds.costs)
    assert "torch.use_deterministic_algorithms(True)" in seeds.done


def test_hash_seeds_cannot_be_set_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told unless it is set."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert any(words.startswith("PYTHONHASHSEED") for words in ddpdebug.seed_everything(1).left)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not any(words.startswith("PYTHONHASHSEED") for words in ddpdebug.seed_everything(1).left)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "7", None])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    """With the range that is valid."""
    with pytest.raises(ddpdebug.UsageError, match="from 0 to 4294967295"):
        ddpdebug.seed_everything(seed)


def test_a_negative_rank_is_refused() -> None:
    """With what was given."""
    with pytest.raises(ddpdebug.UsageError, match="got -1"):
        ddpdebug.seed_everything(1, rank=-1)
