"""Lightning's real Trainer and Fabric, which start their ranks themselves: what is seen, and that nothing changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdebug.run_directory.reader import read_findings, read_rows, read_run

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_SCRIPT = Path(__file__).parent / "scripts" / "lightning_script.py"
_RUN = ["-m", "ddpdebug", "run", "--metrics", "off", "--out", "seen", "--every-step"]
_CHECK = ["-m", "ddpdebug", "check", "--metrics", "off", "--out", "seen"]
_RANK = ["--fail-on-rank", "1"]
#: Words before the script, and after it.
_JOBS: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    "run": (_RUN, []),
    "bf16": (_RUN, ["--precision", "bf16-mixed"]),
    "plain bf16": ([], ["--precision", "bf16-mixed"]),
    "stops": ([*_CHECK, "--steps", "2"], []),
    "fabric stops": ([*_CHECK, "--steps", "2"], ["--fabric"]),
    "fails": (_CHECK, _RANK),
    "callback too": (_RUN, ["--callback"]),
    "fabric": (_RUN, ["--fabric"]),
    "plain fabric": ([], ["--fabric"]),
}

_FABRIC = pytest.param("fabric", marks=pytest.mark.thorough)  # the same entry point as the Trainer's


@dataclass(frozen=True)
class Job:
    """How a job ended."""

    status: int
    told: dict[int, dict[str, Any]]
    text: str
    folder: Path

    @property
    def seen(self) -> Path:
        return self.folder / "seen"


def _run(folder: Path, before: list[str], after: list[str]) -> Job:
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK"}}
    words = [sys.executable, *before, str(_SCRIPT), *after]
    done = subprocess.run(
        words, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    return Job(done.returncode, {one["rank"]: one for one in told}, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """Run what is selected once, two of them at a time."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    fabric = any(item.get_closest_marker("thorough") for item in here)
    pool = ThreadPoolExecutor(2)
    running = {
        name: pool.submit(_run, tmp_path_factory.mktemp("lightning"), *words)
        for name, words in _JOBS.items()
        if fabric or "fabric" not in name
    }

    @cache
    def done(name: str) -> Job:
        return running[name].result()

    return done


@pytest.mark.parametrize(
    "attached, plain",
    [("run", "plain"), ("bf16", "plain bf16"), pytest.param("fabric", "plain fabric", marks=pytest.mark.thorough)],
)
def test_training_is_the_same(job: Callable[[str], Job], attached: str, plain: str) -> None:
    """Weights, optimizer, losses and random numbers of both ranks, to the bit; only the callback has come."""
    one, other = job(attached), job(plain)
    assert (other.status, len(other.told)) == (0, 2), other.text
    assert (one.status, len(one.told)) == (0, 2), one.text
    for rank in (0, 1):
        names = one.told[rank].pop("callbacks", ["AddedCallback"])
        assert "AddedCallback" in names
        assert [name for name in names if name != "AddedCallback"] == other.told[rank].pop("callbacks", [])
        assert one.told[rank] == other.told[rank]


def test_checkpoints_are_the_same(job: Callable[[str], Job]) -> None:
    """What Lightning saves holds nothing of ours and the same tensors."""
    one, other = (
        torch.load(job(name).folder / "checkpoints" / "last.ckpt", weights_only=False) for name in ("run", "plain")
    )
    assert one["callbacks"].keys() == other["callbacks"].keys()
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    assert not any("ddpdebug" in str(value) for value in one.values() if not isinstance(value, dict))


@pytest.mark.parametrize("name", ["run", "bf16", _FABRIC, "callback too"])
def test_all_ranks_are_compared(job: Callable[[str], Job], name: str) -> None:
    """Also the one that Lightning has started as a process of its own; nothing is found in what is healthy."""
    run = read_run(job(name).seen)
    assert run["world"] == 2
    assert run["coverage"]["gaps"] == []
    assert [finding.code for finding in read_findings(job(name).seen)] == []
    assert {row.rank for row in read_rows(job(name).seen)} == {0, 1}


@pytest.mark.parametrize("name", ["run", "bf16"])
def test_losses_are_what_the_module_returned(job: Callable[[str], Job], name: str) -> None:
    """A step's loss is the mean over its micro-batches, of which the last step of an epoch has fewer."""
    rows = {(row.rank, row.step): row for row in read_rows(job(name).seen)}
    for rank, told in ((rank, one["told"]) for rank, one in job(name).told.items()):
        # 7 batches in an epoch: two steps of three, and one of one, which Lightning divides by three all the same
        parts = [
            told[begin : begin + count]
            for epoch in (0, 7)
            for begin, count in ((epoch, 3), (epoch + 3, 3), (epoch + 6, 1))
        ]
        assert len(rows) == 2 * len(parts)
        for step, part in enumerate(parts):
            assert rows[rank, step].loss == pytest.approx(sum(part) / len(part), rel=1e-5)


@pytest.mark.parametrize("name", ["run", "bf16"])
def test_the_validation_loss_is_the_one_that_was_logged(job: Callable[[str], Job], name: str) -> None:
    """Once for each evaluation, with what Lightning reduced over the ranks; its check before training is none."""
    for rank, one in job(name).told.items():
        seen = [row.val_loss for row in read_rows(job(name).seen) if row.rank == rank and row.val_loss == row.val_loss]
        last = one["validated"][: len(seen)]
        assert len(seen) >= 1
        assert seen == pytest.approx(last)
    assert "no validation loss" not in job(name).text


def test_a_run_that_goes_on_from_a_checkpoint(job: Callable[[str], Job], tmp_path: Path) -> None:
    """The load of weights and optimizer on both ranks is no finding, and training ends as without ddpdebug."""
    checkpoint = str(job("plain").folder / "checkpoints" / "last.ckpt")
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / "plain", tmp_path / "run"]
        for folder in folders:
            folder.mkdir()
        plain, attached = pool.map(_run, folders, ([], _RUN), [["--resume", checkpoint]] * 2)
    assert (plain.status, attached.status) == (0, 0), attached.text
    assert {rank: one["weights"] for rank, one in attached.told.items()} == {
        rank: one["weights"] for rank, one in plain.told.items()
    }
    assert plain.told[0]["steps"] == 9
    assert [finding.code for finding in read_findings(attached.seen)] == []


@pytest.mark.parametrize("name", ["stops", pytest.param("fabric stops", marks=pytest.mark.thorough)])
def test_a_check_stops_all_ranks_at_the_same_step(job: Callable[[str], Job], name: str) -> None:
    """The rank that Lightning has started ends well too, so that nobody is told of a lost one."""
    assert job(name).status == 0, job(name).text
    assert "verdict: clean" in job(name).text
    assert {(row.rank, row.step) for row in read_rows(job(name).seen)} == {(r, s) for r in (0, 1) for s in (0, 1)}
    assert "Traceback" not in job(name).text


def test_settings_of_the_command_hold_on_all_ranks(job: Callable[[str], Job]) -> None:
    """Also where the script has a callback with others: the first rank is attached to by the command alone."""
    assert job("callback too").status == 0, job("callback too").text
    assert "differ" not in job("callback too").text


def test_the_rank_that_fails_is_named(job: Callable[[str], Job]) -> None:
    """With its own error, though Lightning started it, and rank 0 only saw the connection break."""
    assert job("fails").status == 3, job("fails").text
    findings = read_findings(job("fails").seen)
    assert {finding.ranks for finding in findings} == {(1,)}
    assert all("this batch cannot be read" in json.dumps(finding.evidence) for finding in findings)
