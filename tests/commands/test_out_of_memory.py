"""An out-of-memory error on one rank of a job."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.run_directory.reader import read_findings, read_outcomes

Command = Callable[..., subprocess.CompletedProcess[str]]
_SCRIPT = """
import torch, time
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4)))
opt = torch.optim.AdamW(ddp.parameters())
gen = torch.Generator().manual_seed(rank)
for step in range(12):
    rows = 60_000 if rank == 3 and step == 6 else 64
    loss = ddp(torch.randn(rows, 64, generator=gen)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.slow
def test_every_rank_leaves_a_summary(command: Command, tmp_path: Path) -> None:
    """The job ends with its own error; the finding names rank, step, phase and cause, every rank its batch."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    options = ("--nproc-per-node", 4, "--out", tmp_path / "out", "--memory-limit", 40_000_000)
    done = command("-m", "ddpdebug", "run", *options, script)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: out of memory: tried to allocate" in done.stderr
    (finding,) = [f for f in read_findings(tmp_path / "out") if f.code == "MEM401"]
    assert (finding.step, finding.ranks, finding.phase, finding.location) == (6, (3,), "forward", "train.py:16")
    assert "a batch larger than ever: its inputs 60000x64" in finding.evidence["cause"]
    assert read_outcomes(tmp_path / "out")[3]["reason"].startswith("exception: OutOfMemoryError")
    for rank in range(4):
        (file,) = (tmp_path / "out" / "ranks" / str(rank) / "memory").glob("*.json")
        summary = json.loads(file.read_text())
        assert (summary["rank"], summary["failed"]) == (rank, rank == 3)
        assert summary["shapes"] == [[60_000 if rank == 3 else 64, 64]]


@pytest.mark.smoke
@pytest.mark.jobs
def test_a_limit_that_is_not_reached_changes_nothing(run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """The counting mode stays out of the way of DDP, the optimizer and ddpdebug itself."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("60_000", "64"))
    options = ["--metrics", "off", "--out", str(tmp_path / "out"), "--memory-limit", "40000000"]
    (ranks,) = run_jobs([{"script": str(script), "options": options, "cwd": str(tmp_path)}])
    assert [rank["status"] for rank in ranks] == [0, 0], ranks
    assert read_findings(tmp_path / "out") == []
    assert not list((tmp_path / "out" / "ranks").glob("*/trouble.jsonl"))
