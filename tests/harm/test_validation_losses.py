"""Where a validation loss comes from, in real runs: told, seen by module or function, or said to be missing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.ci.publish import judge_directory
from ddpdebug.run_directory.reader import read_findings, read_rows

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

#: The longer it trains, the further the targets of the validation are from what it learns.
_SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
kind = sys.argv[1]
torch.manual_seed(0)
model, criterion = nn.Linear(8, 1), nn.MSELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.02)
weight, gen = torch.randn(8, 1), torch.Generator().manual_seed(1)
for step in range(90):
    x = torch.randn(64, 8, generator=gen)
    opt.zero_grad(); loss = F.mse_loss(model(x), x @ weight); loss.backward(); opt.step()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            x = torch.randn(64, 8, generator=gen)
            away = x @ weight + 0.05 * step
            value = criterion(model(x), away) if kind == "module" else F.mse_loss(model(x), away)
        if kind == "told":
            import ddpdebug
            ddpdebug.observe(val_loss=value)
        model.train()
print([p.sum().item().hex() for p in model.parameters()], loss.item().hex())
"""
#: Every step: what is sampled depends on the time that steps take.
_OPTIONS = ["--out", "o", "--metrics", "off", "--every-step"]
_FUNCTIONS = ["--validation-loss", "functions"]
_JOBS: dict[str, tuple[str, list[str] | None]] = {
    "plain": ("function", None),
    "function": ("function", _OPTIONS),
    "module": ("module", _OPTIONS),
    "told": ("told", _OPTIONS),
    "functions": ("function", [*_OPTIONS, *_FUNCTIONS]),
    "module by functions": ("module", [*_OPTIONS, *_FUNCTIONS]),
    "nothing": ("module", [*_OPTIONS, "--validation-loss", "told"]),
}
_SEEN = {
    "module": "seen by nn.MSELoss in evaluation at script.py:19, mean of 1 batch",
    "told": "told by observe(val_loss=)",
    "functions": "seen by torch.nn.functional.mse_loss (--validation-loss functions) in evaluation at script.py:19, "
    "mean of 1 batch",
    "module by functions": "seen by torch.nn.functional.mse_loss (--validation-loss functions) in evaluation at "
    "script.py:19, mean of 1 batch",
}


@pytest.fixture(scope="module")
def results(
    run_jobs: Callable[[list[dict[str, Any]]], list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], Path]]:
    """Run all of them once."""
    jobs = []
    for kind, options in _JOBS.values():
        folder = tmp_path_factory.mktemp("validation")
        (folder / "script.py").write_text(_SCRIPT)
        cwd = str(folder)
        job = {"script": f"{cwd}/script.py", "cwd": cwd, "args": [kind], "ranks": 1, "options": options}
        jobs.append(job)
    done = run_jobs(jobs)
    return {name: (done[i][0], Path(jobs[i]["cwd"]) / "o") for i, name in enumerate(_JOBS)}


@pytest.mark.parametrize("name", [name for name in _JOBS if name != "plain"])
def test_training_is_the_same(results: dict[str, Any], name: str) -> None:
    """Whatever looks at the losses."""
    assert results["plain"][0]["status"] == 0, results["plain"][0]["err"][-3000:]
    assert (results[name][0]["status"], results[name][0]["out"]) == (0, results["plain"][0]["out"])


@pytest.mark.parametrize("name", _SEEN)
def test_findings_say_their_source(results: dict[str, Any], name: str) -> None:
    """The loss that a rule judges, in its evidence; then nothing is missing."""
    findings = {finding.code: finding for finding in read_findings(results[name][1])}
    assert findings["HLTH712"].evidence["validation_loss"] == _SEEN[name]
    assert "no validation loss" not in results[name][0]["err"]


@pytest.mark.parametrize("name", ["function", "nothing"])
def test_a_missing_loss_is_said_once(results: dict[str, Any], name: str) -> None:
    """In a line at the end, and in the record; it takes nothing from the verdict."""
    result, directory = results[name]
    assert [finding.code for finding in read_findings(directory)] == []
    if name == "nothing":  # there nothing looks at evaluations without a DDP
        assert "no validation loss" not in result["err"]
        return
    assert "no validation loss" not in result["err"]  # it stands in the report
    gaps = json.loads((directory / "run.json").read_text())["coverage"]["gaps"]
    assert [(gap["text"], gap["weight"]) for gap in gaps] == [("no validation loss was seen in 17 evaluations", "note")]
    unchecked = judge_directory(directory, None, "error", require_checks=True).unchecked
    assert all(words.startswith("nothing is compared between ranks: there was one") for words in unchecked)


_SUMMED = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model, criterion = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)), nn.MSELoss()
opt, gen = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(dist.get_rank())
samples = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(7))
for step in range(11):
    criterion(model(torch.randn(4, 8, generator=gen)), torch.ones(4, 1)).backward()
    opt.step(); opt.zero_grad()
    if step == 9:
        model.eval()
        with torch.no_grad():
            own = []
            for x in samples:
                loss = criterion(model(x), torch.ones(4, 1))
                own.append(loss.item())
                dist.all_reduce(loss)
        model.train()
        if dist.get_rank() == 0:
            print(sum(own) / 2, loss.item() / own[-1])
dist.destroy_process_group()
"""


def test_a_sum_over_the_ranks_is_another_number(run_jobs: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Also where all have evaluated the same, so that it is their number times as much."""
    (tmp_path / "script.py").write_text(_SUMMED)
    job = {"script": str(tmp_path / "script.py"), "cwd": str(tmp_path), "args": [], "ranks": 2, "options": _OPTIONS}
    first, second = run_jobs([job])[0]
    assert (first["status"], second["status"]) == (0, 0), first["err"]
    mean, times = map(float, first["out"].split())
    assert times == pytest.approx(2)
    rows = [row for row in read_rows(tmp_path / "o") if row.val_loss == row.val_loss]
    assert {row.rank: row.val_loss for row in rows} == pytest.approx({0: mean, 1: mean})


_INNER_LOOP = """
import copy
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model, criterion = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)), nn.MSELoss()
opt, gen = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(dist.get_rank())
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))
lasting = copy.deepcopy(model.module)
inner = torch.optim.SGD(lasting.parameters(), lr=0.01)

def adapt():
    nn.functional.mse_loss(lasting(torch.randn(4, 8, generator=gen)), torch.zeros(4, 1)).backward()
    inner.step(); inner.zero_grad()

for step in range(12):
    if step == 10:
        model.eval()
        with torch.no_grad():
            value = criterion(model(x), torch.ones(4, 1)).item()
        model.train()
    lasting.load_state_dict(model.module.state_dict())
    adapt()
    loss = criterion(model(torch.randn(4, 8, generator=gen)), torch.ones(4, 1))
    loss.backward()
    if step == 11:
        adapt()
    opt.step(); opt.zero_grad()
print(value)
dist.destroy_process_group()
"""


def test_an_inner_loop_takes_nothing_from_the_model(run_jobs: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Its evaluation before, and its forward where copies take a step after its backward."""
    (tmp_path / "script.py").write_text(_INNER_LOOP)
    job = {"script": str(tmp_path / "script.py"), "cwd": str(tmp_path), "args": [], "ranks": 2, "options": _OPTIONS}
    done = run_jobs([job])[0]
    assert [rank["status"] for rank in done] == [0, 0], done[0]["err"]
    rows = list(read_rows(tmp_path / "o"))
    for rank, one in enumerate(done):
        value = float(one["out"])
        own = {row.step: row for row in rows if row.rank == rank and row.optimizer == 0}
        assert own[10].val_loss == pytest.approx(value)
        assert [(row.syncs, math.isfinite(row.loss)) for row in (own[10], own[11])] == [(11, True), (12, True)]
