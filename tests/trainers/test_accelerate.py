"""Accelerate under `ddpdebug run`, by its own ways to start ranks, and with `ddpdebug.watch()` in the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.run_directory.reader import read_findings, read_run, read_steps
from ddpdebug.schema.finding import Severity
from ddpdebug.schema.step import Step

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.jobs, pytest.mark.slow]

#: 10 batches on each rank, four to a step: the last step of an epoch has two.
_SCRIPT = """
import hashlib, json, sys
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(precision):
    if "watch" in sys.argv:
        import ddpdebug
        ddpdebug.watch(out="o", every_step=True, metrics="off")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision=precision)
    set_seed(0)
    x = torch.randn(160, 8)
    data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=12)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True), schedule
    )
    losses, norms = [[]], []
    for epoch in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
            losses += [[]] if accelerator.sync_gradients else []
        if epoch == 0:
            accelerator.save_state("state")
            accelerator.wait_for_everyone()
            accelerator.load_state("state")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    with open(f"{accelerator.process_index}.json", "w") as file:
        json.dump({"losses": losses[:-1], "norms": norms, "digest": digest, "world": accelerator.num_processes}, file)
    accelerator.end_training()

if __name__ == "__main__":
    if "notebook" in sys.argv:
        notebook_launcher(train, ("bf16",), num_processes=2)
    else:
        train("bf16")
"""
_PYTHON, _OPTIONS = [sys.executable], ["run", "--every-step", "--out", "o"]
_TORCHRUN = [*_PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_LAUNCH = [*_PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
_LAUNCH += ["--main_process_port", "0"]  # one that is free
_WAYS = {
    "plain": [*_TORCHRUN, "train.py"],
    "accelerate launch": [*_LAUNCH, "-m", "ddpdebug", *_OPTIONS, "train.py"],
    "notebook_launcher": [*_PYTHON, "-m", "ddpdebug", *_OPTIONS, "train.py", "notebook"],
    "watch": [*_TORCHRUN, "train.py", "watch"],
}
_WATCHED = [way for way in _WAYS if way != "plain"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Train once each way."""
    found = {}
    for number, (way, words) in enumerate(_WAYS.items()):
        found[way] = folder = tmp_path_factory.mktemp(str(number))
        (folder / "train.py").write_text(_SCRIPT, "utf-8")
        settings = {"OMP_NUM_THREADS": "1", "DDPDEBUG_METRICS": "off"}
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (way, done.stderr)
    return found


def _end(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has written at its end."""
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def _steps(folder: Path) -> list[Step]:
    return list(read_steps(folder / "o"))


@pytest.mark.parametrize("way", _WATCHED)
def test_it_trains_as_it_does_without(way: str, runs: Mapping[str, Path]) -> None:
    """Weights and losses of both ranks, and the state that was saved half-way."""
    assert _end(runs[way]) == _end(runs["plain"])
    assert [one["world"] for one in _end(runs[way])] == [2, 2]
    states = [{path.name: path.read_bytes() for path in (runs[name] / "state").iterdir()} for name in ("plain", way)]
    assert len(states[0]) >= 4
    assert states[0] == states[1]


@pytest.mark.parametrize("way", _WATCHED)
def test_both_ranks_and_all_steps_are_seen(way: str, runs: Mapping[str, Path]) -> None:
    """With their micro-batches, losses and norms, and nothing is found."""
    steps, ends = _steps(runs[way]), _end(runs["plain"])
    assert [[row.micro_batches for row in step.rows.values()] for step in steps] == 2 * [[4, 4], [4, 4], [2, 2]]
    for rank, end in enumerate(ends):
        means = [sum(losses) / len(losses) for losses in end["losses"]]
        assert [step.rows[rank].loss for step in steps] == pytest.approx(means, rel=1e-5)
        assert [step.rows[rank].clip_norm for step in steps] == pytest.approx(end["norms"], rel=1e-6)
    # which rank is slow is the machine's affair
    found = [f for f in read_findings(runs[way] / "o") if f.severity >= Severity.WARNING]
    assert [f for f in found if not f.code.startswith("SLOW")] == []
    assert read_run(runs[way] / "o")["outcome"]["reason"] == "finished"
