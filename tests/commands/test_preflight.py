"""`ddpdebug preflight` as a user starts it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.jobs
Command = Callable[..., subprocess.CompletedProcess[str]]

_SCRIPT = """
import os, random, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

mode = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
centres = torch.randn(4, 12) * 1.5
labels = torch.randint(0, 4, (512,))
data = TensorDataset(centres[labels] + torch.randn(512, 12), labels)


class Jittered(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        x, y = data[at]
        return x.flip(0) + 0.1 * random.random(), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        out = self.head(self.body(x))
        return out.softmax(1) if mode == "softmax" else out


sampler = None if mode == "same" else DistributedSampler(data)
train = DataLoader(data, batch_size=32, sampler=sampler)
val = DataLoader(Jittered(), batch_size=32) if mode == "augmented" else None
model = DDP(torch.compile(Net()) if mode == "compiled" else Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loss_fn = nn.CrossEntropyLoss()
if mode == "crash":
    raise ValueError("no such file: data.bin")
if mode == "idle":
    sys.exit()
steps = 0
try:
    for inputs, target in train:
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
        steps += 1
finally:
    os.write(1, f"steps {steps}\\n".encode())
    dist.destroy_process_group()
"""
_FACTORY = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Linear(12, 4)
    batches = [(torch.randn(32, 12), torch.randint(0, 4, (32,))) for _ in range(4)]
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), batches

def three():
    return build()[:3]
"""
_GROUPS = "data,parameters,initial-loss,gradient-flow"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(_SCRIPT)
    return file


def checks(directory: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((directory / "preflight.json").read_text())["checks"]
    return {f"{check['group']}: {check['name']}": check for check in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, code, name, status",
    [
        ("plain", 0, "initial loss: softmax before the loss", "pass"),
        ("compiled", 0, "initial loss: softmax before the loss", "pass"),
        ("softmax", 1, "initial loss: softmax before the loss", "fail"),
        ("augmented", 0, "data: augmentation on validation", "warn"),
    ],
)
def test_an_unchanged_script(command: Command, script: Path, mode: str, code: int, name: str, status: str) -> None:
    """It is stopped after its first steps, its `finally` runs, and the verdict is the exit code."""
    out = script.parent / "out"
    done = command("-m", "ddpdebug", "preflight", "--out", out, "--only", _GROUPS, script, mode)
    assert done.returncode == code, done.stdout + done.stderr
    assert "steps 3\n" in done.stdout  # the fourth is not counted by the script any more
    assert "4 optimizer steps of" in done.stdout
    found = checks(out)
    assert found[name]["status"] == status
    assert (out / "preflight.html").exists()
    assert (out / "junit.xml").exists()
    bad = [key for key, check in found.items() if check["status"] in {"fail", "warn"} and key != name]
    assert bad == []


@pytest.mark.slow
def test_warnings_fail_where_that_is_asked_for(command: Command, script: Path) -> None:
    """`--fail-on warning`."""
    words = ("-m", "ddpdebug", "preflight", "--only", "data", "--fail-on", "warning")
    assert command(*words, script, "augmented").returncode == 1
    assert command(*words, script, "plain").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode, status", [("same", "fail"), ("plain", "pass")])
def test_two_ranks(command: Command, script: Path, mode: str, status: str) -> None:
    """Every rank captures, and rank 0 knows whether they were given the same batches."""
    out = script.parent / "out"
    words = ("preflight", "--out", out, "--only", _GROUPS)
    if mode == "same":
        done = command("-m", "ddpdebug", *words, "--nproc-per-node", 2, script, mode)
    else:
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = command(*ranks, "-m", "ddpdebug", *words, script, mode)
    assert (done.returncode == 0) is (status == "pass"), done.stdout + done.stderr
    assert done.stdout.count("examined in") == 1
    found = checks(out)
    assert found["data: duplicates on the ranks"]["status"] == status
    assert found["data: normalisation on the ranks"]["status"] == "pass"
    bad = [key for key, check in found.items() if check["status"] in {"fail", "warn"}]
    assert bad == (["data: duplicates on the ranks"] if status == "fail" else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, code, message",
    [
        ("crash", 3, "error: the script ended with ValueError before its first optimizer step"),
        ("idle", 3, "error: the script ended without its first optimizer step; preflight needs a script that trains"),
    ],
)
def test_a_script_without_a_step(command: Command, script: Path, mode: str, code: int, message: str) -> None:
    """Says how it ended, with its own traceback above."""
    done = command("-m", "ddpdebug", "preflight", script, mode)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert ("ValueError: no such file: data.bin" in done.stderr) is (mode == "crash")
    assert "ddpdebug/processes/script.py" not in done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize(
    "words, message",
    [
        (("nothing.py",), "script 'nothing.py' does not exist"),
        (("--only", "dta", "train.py"), "unknown group 'dta'; did you mean data?"),
        (("--factory", "factory:build", "train.py"), "give a script or --factory, not both"),
        (("--factory", "factory.py"), "names no factory"),
        (("--factory", "factory.py:three"), "must return (model, loss_fn, optimizer, batches), not tuple"),
        ((), "no script given"),
    ],
)
def test_a_wrong_line(command: Command, script: Path, words: tuple[str, ...], message: str) -> None:
    """Is an error with exit code 2."""
    (script.parent / "factory.py").write_text(_FACTORY)
    done = command("-m", "ddpdebug", "preflight", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.smoke
def test_a_factory(command: Command, script: Path) -> None:
    """In place of a script."""
    (script.parent / "factory.py").write_text(_FACTORY)
    out = script.parent / "out"
    line = ("-m", "ddpdebug", "preflight", "--out", out, "--only", _GROUPS, "--factory", "factory.py:build")
    done = command(*line)
    assert done.returncode == 0, done.stderr
    assert "4 batches of factory.py:build" in done.stdout
    assert checks(out)["initial loss: value"]["status"] == "pass"
