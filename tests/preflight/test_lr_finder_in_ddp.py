"""`find_lr` inside a DDP job: the ranks stay in step, and the job goes on as if nothing had been."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from preflight_subjects import batches, cross_entropy, network, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.preflight.checks.lr_sweep import End

pytestmark = pytest.mark.ranks(2)


def job(rank: int, **settings: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer, list[Any]]:
    """Return a model, its optimizer and this rank's own batches."""
    model = DistributedDataParallel(network(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    return model, optimizer, batches(seed=1)[rank::2]


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, own: list[Any], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_fn(model, own[step % len(own)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("views", [False, True])
def test_all_ranks_return_the_same_and_train_on_as_before(rank: int, micro_batches: int, views: bool) -> None:
    """Each rank has its own batches and dropout; what is measured is the mean, and training is not touched."""
    model, optimizer, own = job(rank, gradient_as_bucket_view=views)
    train(model, optimizer, own, 3)
    before = state_of(model.module, optimizer)
    sweep = ddpdebug.find_lr(model, optimizer, loss_fn, own, micro_batches=micro_batches, steps=50)
    after = state_of(model.module, optimizer)
    assert after == before
    losses = train(model, optimizer, own, 4)
    again, second, own = job(rank, gradient_as_bucket_view=views)
    train(again, second, own, 3)
    assert train(again, second, own, 4) == losses
    first, other = gathered((sweep.rates, sweep.losses, sweep.end))
    assert first == other
    assert sweep.steepest is not None


def test_ranks_stop_together_when_one_diverges(rank: int) -> None:
    """Only rank 1's loss becomes NaN; both end at that step with the same reason."""
    model, optimizer, own = job(rank)
    calls = iter(range(1000))

    def bad(model: nn.Module, batch: Any) -> torch.Tensor:
        number = next(calls)
        return loss_fn(model, batch) * (math.nan if rank == 1 and number == 20 else 1.0)

    before = state_of(model.module, optimizer)
    sweep = ddpdebug.find_lr(model, optimizer, bad, own)
    assert (len(sweep.losses), sweep.end) == (20, End.NONFINITE)
    assert gathered(sweep.losses)[0] == sweep.losses
    assert state_of(model.module, optimizer) == before


def test_ranks_that_ask_for_different_things_are_told(rank: int) -> None:
    """On both ranks, before the first step."""
    model, optimizer, own = job(rank)
    with pytest.raises(ddpdebug.UsageError, match=r"the ranks differ in steps \(40.0 to 41.0\)"):
        ddpdebug.find_lr(model, optimizer, loss_fn, own, steps=40 + rank)


@pytest.mark.smoke
def test_what_watches_the_job_does_not_take_the_sweep_for_training(
    rank: int, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    """A sweep that ends in divergence is no finding and counts no steps; what follows is watched as ever."""
    for name, value in (("OUT", shared_tmp_path / "run"), ("METRICS", "off"), ("QUIET", 1)):
        monkeypatch.setenv(f"DDPDEBUG_{name}", str(value))
    model, optimizer, own = job(rank)
    monitor = ddpdebug.watch(model, optimizer)
    train(model, optimizer, own, 2)
    sweep = ddpdebug.find_lr(model, optimizer, loss_fn, own, highest=1e5)
    train(model, optimizer, own, 3)
    monitor.close()
    assert sweep.end is End.DIVERGED
    assert monitor.findings == []
    assert list(monitor._steps.values()) == [5]
