"""`DebugDDP`, `watch` and the monitor on real ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug

pytestmark = pytest.mark.ranks(2)


class Scaled(nn.Module):
    """A layer whose factor is no parameter, so that ranks may disagree about it unseen."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.layer(x)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path) -> None:
    for name, value in (("OUT", shared_tmp_path / "run"), ("METRICS", "off"), ("QUIET", 1)):
        monkeypatch.setenv(f"DDPDEBUG_{name}", str(value))
    torch.manual_seed(3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, each: Callable[[int], None] | None = None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if each is not None:
            each(step)


def found(monitor: ddpdebug.Monitor) -> list[tuple[object, ...]]:
    return [(f.code, f.step, f.ranks, f.subject) for f in monitor.findings]


@pytest.mark.smoke
def test_debug_ddp_is_watched_from_its_construction_on(rank: int) -> None:
    """Both ranks know the finding, which names both because two cannot tell."""
    model = ddpdebug.DebugDDP(Scaled(1.0))
    monitor = model.monitor
    assert monitor is not None
    train(model, torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.2), 12)
    monitor.close()
    monitor.close()
    assert found(monitor) == [("RANK104", 0, (0, 1), ("param_groups[0].lr",))]


def test_a_pickle_names_the_public_class(rank: int) -> None:
    """So that a checkpoint of a whole model does not depend on where the class stands."""
    model = ddpdebug.DebugDDP(Scaled(1.0))
    assert pickle.loads(pickle.dumps(type(model))) is ddpdebug.DebugDDP
    assert (type(model).__module__, type(model).__qualname__) == ("ddpdebug", "DebugDDP")
    assert model.monitor is not None
    model.monitor.close()


def test_watch_finds_a_named_replica_that_differs(rank: int) -> None:
    """The context manager closes the monitor; what it found stays."""
    model = DistributedDataParallel(Scaled(1.0))
    copy = Scaled(1.0)
    with ddpdebug.watch(model) as monitor:
        monitor.watch_replica("average", copy)

        def each(step: int) -> None:
            with torch.no_grad():
                copy.layer.bias.fill_(step + 10.0 * rank)

        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 12, each)
    ((code, _, ranks, subject),) = found(monitor)
    assert (code, ranks) == ("RANK113", (0, 1))
    assert any("average" in name for name in subject)


def test_the_agreement_probe_leaves_no_trace(rank: int) -> None:
    """One batch through both ranks' modules shows that they compute different functions."""
    model = DistributedDataParallel(Scaled(1.0 + rank))
    monitor = ddpdebug.watch(model)
    before = torch.get_rng_state()
    monitor.agree(torch.ones(2, 4))
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 30)
    assert torch.equal(before, torch.get_rng_state())
    assert model.module.training
    monitor.close()
    told = {(finding.code, finding.phase) for finding in monitor.findings}
    assert told == {("RANK107", "agreement probe"), ("RANK107", "settings")}


def test_raise_ends_all_ranks_at_the_same_step_with_the_same_words(rank: int) -> None:
    """No rank is left waiting for one that has stopped."""
    model = DistributedDataParallel(Scaled(1.0))
    monitor = ddpdebug.watch(model, on_finding="raise")
    taken: list[int] = []
    with pytest.raises(
        ddpdebug.FindingError, match="RANK104 optimizer settings differ between ranks at step 0"
    ) as error:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank), 4000, taken.append)
    monitor.close()
    told: list[tuple[str, int]] = [("", 0), ("", 0)]
    dist.all_gather_object(told, (str(error.value), len(taken)))
    assert told[0] == told[1]
    assert len(taken) < 4000


@pytest.mark.parametrize("who", ["rank 1", "both", "now and then"])
def test_a_number_that_changes_on_one_rank_is_told(rank: int, who: str) -> None:
    """The factor of rank 1 is halved after step 9; where that of both is, or only for some steps, all is well."""
    net = Scaled(1.0)
    model = ddpdebug.DebugDDP(net)
    monitor = model.monitor

    def halve(step: int) -> None:
        if step == 9 and (rank == 1 or who == "both"):
            net.factor = 0.5
        if step == 18 and who == "now and then":
            net.factor = 1.0

    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 24, halve)
    assert monitor is not None
    monitor.close()
    told = [entry for entry in found(monitor) if entry[0] == "RANK107"]
    assert told == ([("RANK107", 10, (1,), ("factor",))] if who == "rank 1" else [])


class Mixed(nn.Module):
    """Mixes the rows of a batch by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(matrix, self.inner(x))


def test_a_sparse_tensor_beside_a_batch_of_a_loader(rank: int) -> None:
    """It has no size in bytes; that it is the same on all ranks does not make the batches equal."""
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(rank)))
    model = ddpdebug.DebugDDP(Mixed())
    monitor = model.monitor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (rows,) in torch.utils.data.DataLoader(data, batch_size=2):
        loss = model(torch.eye(2).to_sparse(), rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert monitor is not None
    assert not monitor.guard.off
    monitor.close()
    assert found(monitor) == []


@pytest.mark.parametrize("kept", ["first", "shadowed", "whole"])
def test_a_batch_of_a_loader_that_is_used_again_and_again_is_told(rank: int, kept: str) -> None:
    """Kept before the loop, or in it in place of the new ones; a batch that is the whole data set is meant."""
    generator = torch.Generator().manual_seed(rank)
    data = torch.utils.data.TensorDataset(torch.randn(48, 4, generator=generator))
    loader = torch.utils.data.DataLoader(data, batch_size=48 if kept == "whole" else 2)
    model = ddpdebug.DebugDDP(nn.Linear(4, 1))
    monitor = model.monitor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = next(iter(loader))
    for _, new in zip(range(20), loader if kept == "shadowed" else [batch] * 20, strict=False):
        assert len(new[0])
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert monitor is not None
    monitor.close()
    told = [entry[:3] for entry in found(monitor) if entry[0] == "DATA906"]
    assert told == ([] if kept == "whole" else [("DATA906", 0, (0, 1))])
