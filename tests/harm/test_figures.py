"""Figures of real jobs: norms without a loss scale, who is blamed for two faults, and what the endpoints say of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.reports.reading import read_history
from ddpdebug.reports.top.snapshot import from_directory
from ddpdebug.run_directory.reader import read_steps
from ddpdebug.schema.finding import UNDECIDED
from ddpdebug.schema.step import Step

pytestmark = [pytest.mark.jobs, pytest.mark.slow]
_SCALED = ("float16", "bfloat16", "own", "weighted")


def _both(script: str, args: list[str], options: list[str], folder: Path, **more: Any) -> list[dict[str, Any]]:
    """Return a job without ddpdebug and with it."""
    jobs = []
    for name, given in (("plain", None), ("watched", ["--every-step", *options])):
        (folder / name).mkdir(parents=True)
        job = {
            "script": script,
            "args": args,
            "options": given,
            "cwd": str(folder / name),
            "patient": True,
            "meets": 0,
        }
        jobs.append({**job, **more})
    return jobs


def _directory(job: dict[str, Any]) -> Path:
    (directory,) = Path(job["cwd"]).glob("ddpdebug-runs/*")
    return directory


@pytest.fixture(scope="module")
def scaled(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, Any]]:
    """The jobs that scale their losses: what they said without and with ddpdebug, and the steps that it saw."""
    pairs = {kind: _both("scaled.py", [kind], ["--metrics", "off"], tmp_path_factory.mktemp("s")) for kind in _SCALED}
    done = run_jobs([job for pair in pairs.values() for job in pair])
    results = dict(zip(_SCALED, zip(done[::2], done[1::2], strict=True), strict=True))
    return {kind: (*results[kind], list(read_steps(_directory(pairs[kind][1])))) for kind in _SCALED}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.smoke if kind == "own" else ()) for kind in _SCALED]
)
def test_norms_are_those_of_the_gradients_without_the_loss_scale(
    kind: str, scaled: dict[str, tuple[Any, Any, Any]], compare: Callable[..., list[str]]
) -> None:
    """GradScaler's, which grows meanwhile, and one of the script's own; a weight of the loss is none."""
    plain, watched, steps = scaled[kind]
    assert [rank["status"] for rank in plain] == [0, 0], plain
    assert compare(plain, watched) == []
    line = next(line for line in watched[0]["out"].splitlines() if line.startswith("norms "))
    true = ast.literal_eval(line.removeprefix("norms "))
    told: list[Step] = [step for step in steps if step.optimizer == 0]
    assert len(told) == len(true)
    for step, norm in zip(told, true, strict=True):
        for row in step.rows.values():
            assert row.grad_norm == pytest.approx(norm, rel=1e-3)
            assert row.local_grad_norm == pytest.approx(norm, rel=1e-3)


@pytest.fixture(scope="module")
def faulty(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The job with two faults: what its ranks said without and with ddpdebug, and its folder."""
    options = ["--metrics", "per-rank", "--metrics-port", "0", "--sd-dir", "targets"]
    pair = _both("two_faults.py", ["scrape"], options, tmp_path_factory.mktemp("two"), ranks=4)
    plain, watched = run_jobs(pair)
    return plain, watched, Path(pair[1]["cwd"])


def test_two_faulty_ranks_of_four_are_blamed_and_nobody_else(
    faulty: tuple[Any, Any, Path], compare: Callable[..., list[str]]
) -> None:
    """Those who are equal are right, although they are no more than half."""
    plain, watched, folder = faulty
    assert [rank["status"] for rank in plain] == [0] * 4, plain
    assert compare(plain, watched) == []
    (file,) = folder.glob("ddpdebug-runs/*/findings.jsonl")
    findings = [json.loads(line) for line in file.read_text().splitlines()]
    apart = [found for found in findings if found["code"] == "RANK101"]
    blamed = {rank for found in apart for rank in found["ranks"]}
    assert blamed == {1, 2}, findings
    assert not any(UNDECIDED in found["evidence"] for found in findings)
    history, snapshot = read_history(file.parent), from_directory(file.parent)
    assert (sorted(history.culprits), history.undecided) == ([1, 2], 0)
    assert [rank.rank for rank in snapshot.ranks if rank.outvoted] == [1, 2]
    assert snapshot.undecided == ()


def test_the_endpoints_blame_them_too_and_say_what_all_know_twice(faulty: tuple[Any, Any, Path]) -> None:
    """By rank, by number, and by name in the newest incidents; the ranks take their steps together all the same."""
    found = json.loads((faulty[2] / "scraped.json").read_text())
    assert sorted(found) == ["0", "1", "2", "3"]

    def told(name: str, **labels: str) -> dict[str, float]:
        """Return what each rank says in a sample with these labels."""
        words = [f'{key}="{value}"' for key, value in labels.items()]
        return {
            rank: float(value)
            for rank, own in found.items()
            for key, value in own.items()
            if key.split(" ")[0] == name and all(word in key for word in words)
        }

    assert told("rank_outvoted", what="parameters") == {"0": 0, "1": 1, "2": 1, "3": 0}
    assert told("ranks_disagreeing", what="parameters") == {"0": 2, "3": 2}
    assert told("steps_apart") == {"0": 0, "3": 0}
    assert told("nonfinite_origin") == dict.fromkeys("0123", 0)
    culprits = {key.split('culprits="')[1].split('"')[0] for key in found["0"] if key.startswith("incident_step ")}
    assert culprits
    assert culprits <= {"1", "2", "1-2"}
    assert not told("device_memory_bytes")
    # rank 2 has slept between its steps, where nothing is measured: that is the least it can have taken
    assert told("phase_seconds_sum", phase="other")["2"] >= 23 * 0.02
