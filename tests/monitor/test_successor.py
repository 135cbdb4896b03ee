"""Of very many ranks the next one judges when the first has left, and knows what that one was told."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.run_directory.reader import read_findings

sys.path.append(str(Path(__file__).parent.parent / "support"))
from machine import until


@pytest.mark.smoke
@pytest.mark.ranks(4)
def test_it_names_hosts(rank: int, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path) -> None:
    """Each rank has told its own once, to the rank that judged."""
    monkeypatch.setattr("ddpdebug.schema.step.FLAT", 1)
    for name in ("SIZE", "_MOST_NEIGHBOURS", "_NEIGHBOURS"):
        monkeypatch.setattr(f"ddpdebug.exchange.tree.{name}", 2)
    # of the processes that run tests some have had more monitors than others
    monkeypatch.setattr("ddpdebug.monitor.monitor._NUMBERS", itertools.count(1000))
    monkeypatch.setattr("platform.node", lambda: f"node-{rank // 2}")
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ddpdebug.watch(model, optimizer, out=shared_tmp_path / "run", metrics="off", quiet=True)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    train(8)
    if rank == 0:
        monkeypatch.setattr("ddpdebug.exchange.ticks.LEAVE_SECONDS", 0.1)  # it does not wait for the others
        monitor.close()
        return
    assert monitor._exchange is not None
    until(lambda: getattr(monitor._exchange, "_members", ()) == (1, 2, 3))
    with model.no_sync():
        train(8)
        optimizer.param_groups[0]["lr"] = 0.2 if rank == 3 else 0.1
        train(40)
    # what the judge finds only as all leave the others do not hear
    assert until(lambda: any(finding.code == "RANK104" for finding in monitor.findings))
    monitor.close()
    if rank == 1:  # it writes in the place of rank 0
        assert "RANK104" in {finding.code for finding in read_findings(shared_tmp_path / "run")}
    places = {finding.code: finding.places for finding in monitor.findings}
    assert places["RANK104"] == {"3": "node-1"}
