"""`ddpdebug check --self-test`: the rules find known faults in the user's own script, or it says that they do not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ddpdebug.ci.github_gitlab import to_markdown
from ddpdebug.ci.json_junit import to_junit
from ddpdebug.ci.selftest import FAULTS, prove
from ddpdebug.ci.verdict import Outcome, Word, judge
from ddpdebug.schema.finding import Finding, Severity

Command = Callable[..., subprocess.CompletedProcess[str]]

_LOADER = """
import torch
from torch import nn, distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for x, y in DataLoader(data, 8, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
"""


def _finding(code: str) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, title="x")


def test_what_counts_as_found() -> None:
    """A code that must come, or one of its family, proves the rule; one that the healthy run raises does not."""
    flip, skipped = FAULTS[0], FAULTS[1]
    assert prove(flip, [_finding("RANK101")], ()).verified
    assert not prove(flip, [_finding("RANK101")], ("RANK101",)).verified
    assert not prove(flip, [_finding("RANK103")], ()).verified
    assert "RANK103 was raised instead" in prove(flip, [_finding("RANK103")], ()).words
    assert "its run ended as hang" in prove(flip, [], (), "its run ended as hang").words
    assert prove(skipped, [_finding("SYNC205")], ()).verified
    assert not prove(skipped, [_finding("NUM303")], ()).verified


def test_a_missed_fault_fails_the_check() -> None:
    """Rules that miss a fault are told in every format, and the exit code is that of a finding."""
    outcomes = {rank: Outcome(rank=rank, reason="finished", exit_code=0, steps={"0": 5}) for rank in range(2)}
    healthy = judge([], outcomes, world=2)
    proofs = tuple(prove(fault, [_finding(fault.expected[0].replace("*", "301"))], ()) for fault in FAULTS)
    assert replace(healthy, proofs=proofs).exit_code == 0
    assert "detectors verified" in to_markdown(replace(healthy, proofs=proofs), None)
    missed = replace(healthy, proofs=(*proofs[:-1], prove(FAULTS[-1], [], ())), word=Word.MISSED)
    assert missed.exit_code == 1
    assert "1 of 5 known faults were missed" in to_markdown(missed, None)
    suite = ET.fromstring(to_junit(missed, None).split("\n", 1)[1]).find("testsuite[@name='self-test']")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("5", "1")


@pytest.mark.jobs
@pytest.mark.slow
def test_faults_are_found_in_a_script(command: Command, tmp_path: Path) -> None:
    """All five faults are put into an ordinary script with a DataLoader and are found."""
    (tmp_path / "train.py").write_text(_LOADER, encoding="utf-8")
    options = ("--nproc-per-node", 2, "--self-test", "--json", "v.json", "--out", "o")
    done = command("-m", "ddpdebug", "check", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert "detectors verified" in done.stderr
    proofs = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["self_test"]
    assert [proof["fault"] for proof in proofs] == [fault.name for fault in FAULTS]
    assert all(proof["verified"] for proof in proofs)


@pytest.mark.slow
@pytest.mark.jobs
def test_nothing_is_proved_where_nothing_runs(command: Command, tmp_path: Path) -> None:
    """A script that fails as it is proves nothing, and one rank has nobody to be compared with."""
    (tmp_path / "train.py").write_text("raise SystemExit(3)", encoding="utf-8")
    done = command("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--self-test", "train.py")
    assert (done.returncode, "nothing was proved" in done.stderr) == (3, True), done.stderr
    done = command("-m", "ddpdebug", "check", "--self-test", "train.py")
    assert (done.returncode, "--nproc-per-node 2 or more" in done.stderr) == (2, True), done.stderr
