"""Faults in the numbers of one of two ranks: who is named, and what the guard does on all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, StepJudged
from ddpdebug.sinks.prometheus.exporter import PrometheusSink

pytestmark = [pytest.mark.jobs, pytest.mark.slow]
_SERIOUS = {"error", "critical"}


def _findings(job: dict[str, Any]) -> list[dict[str, Any]]:
    (file,) = Path(job["cwd"]).glob("ddpdebug-runs/*/findings.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _job(fault: str, tmp_path: Path, *options: str, optimizer: str = "adamw") -> dict[str, Any]:
    folder = tmp_path / f"{fault}-{'-'.join(options)}-{optimizer}"
    folder.mkdir()
    args = [fault, optimizer]
    job = {"script": "numerics.py", "args": args, "options": ["--metrics", "off", *options], "cwd": str(folder)}
    return {**job, "patient": True}


@pytest.fixture(scope="module")
def observed(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The findings of every fault, with the guard at `observe`."""
    jobs = [_job(fault, tmp_path_factory.mktemp("numerics")) for fault in _EXPECTED]
    for result in run_jobs(jobs):
        assert [rank["status"] for rank in result] == [0, 0], result
        assert "switched itself off" not in result[0]["err"]
    return {fault: _findings(job) for fault, job in zip(_EXPECTED, jobs, strict=True)}


#: fault -> code, first subject
_EXPECTED = {
    "forward": ("NUM301", "blocks.1"),
    "loss": ("NUM302", "loss"),
    "backward": ("NUM303", "blocks.1"),
    "input": ("NUM305", "x"),
    "masked": ("NUM308", "blocks.1"),
    "none": None,
}


@pytest.mark.parametrize("fault", _EXPECTED)
def test_the_first_culprit_is_named_and_nothing_else(fault: str, observed: dict[str, list[dict[str, Any]]]) -> None:
    """One finding with the rank, the step and the place; what follows from it is no finding; the twin has none."""
    found = [(f["code"], f["ranks"], f["step"], f["subject"][0]) for f in observed[fault]]
    expected = _EXPECTED[fault]
    assert found == ([] if expected is None else [(expected[0], [1], 5, expected[1])])


@pytest.mark.parametrize("fault", [fault for fault in _EXPECTED if fault not in {"masked", "none"}])
def test_the_metrics_name_the_rank_that_made_it(fault: str, observed: dict[str, list[dict[str, Any]]]) -> None:
    """Only that one, although all ranks are NaN a step later."""
    sink = PrometheusSink(0, mode="rank0")
    sink.write(StepJudged(step=Step(step=0, optimizer=0, world=2, rows={rank: Row(rank=rank) for rank in (0, 1)})))
    for finding in observed[fault]:
        sink.write(FindingRaised(finding=Finding.from_json(json.dumps(finding))))
    told = next(family for family in sink.collect() if family.name == "ddpdebug_nonfinite_origin")
    sink.close()
    assert {sample.labels["rank"]: sample.value for sample in told.samples} == {"0": 0, "1": 1}


@pytest.mark.smoke
def test_the_line_of_the_loss_is_named(observed: dict[str, list[dict[str, Any]]]) -> None:
    """A loss that the loss function broke is located at the assignment that made it."""
    source = Path(__file__).with_name("scripts") / "numerics.py"
    line = 1 + next(i for i, text in enumerate(source.read_text().splitlines()) if "* 0).mean()" in text)
    (finding,) = observed["loss"]
    assert finding["location"].endswith(f"numerics.py:{line}")


def test_the_sample_is_named(observed: dict[str, list[dict[str, Any]]]) -> None:
    """A bad input is located to its samples."""
    (finding,) = observed["input"]
    assert finding["evidence"]["samples"] == {"1": [2]}


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_stop_ends_all_ranks_alike_before_the_update(fault: str, run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """Both ranks raise the finding's text at the same step, and no parameter has changed."""
    (result,) = run_jobs([_job(fault, tmp_path, "--guard", "stop")])
    lines = [next(line for line in rank["out"].splitlines() if line.startswith("stopped")) for rank in result]
    assert lines[0] == lines[1]
    code, module = _EXPECTED[fault] or ("", "")
    assert lines[0].startswith(f"stopped 5 True FindingError {code}")
    assert f"at step 5, ranks 1: {module}" in lines[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_skip_changes_nothing_and_is_told(run_jobs: Callable[..., Any], tmp_path: Path, optimizer: str) -> None:
    """The bad step changes neither parameters nor state on any rank, training goes on alike, the skip is counted."""
    job = _job("backward", tmp_path, "--guard", "skip", optimizer=optimizer)
    (result,) = run_jobs([job])
    steps = [[line for line in rank["out"].splitlines() if line.startswith("step")] for rank in result]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 12
    assert [line.split()[2] for line in steps[0]] == ["True"] * 5 + ["False"] + ["True"] * 6
    assert steps[0][5].split()[3] == "False"
    assert "step 5 was skipped by the numeric guard" in result[0]["err"]
    assert [f["code"] for f in _findings(job)] == ["NUM303"]
    (run,) = Path(job["cwd"]).glob("ddpdebug-runs/*/run.json")
    assert json.loads(run.read_text())["outcome"]["skipped_steps"] == {"0": 1}


def test_skips_are_bounded(run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """One step more than `--max-skips` ends the run on all ranks, with the reason."""
    (result,) = run_jobs([_job("always", tmp_path, "--guard", "skip", "--max-skips", "3")])
    lines = [next(line for line in rank["out"].splitlines() if line.startswith("stopped")) for rank in result]
    assert lines[0] == lines[1]
    assert lines[0].startswith("stopped 3 True FindingError NUM302")
    assert "--max-skips is 3" in lines[0]


def test_guarding_a_healthy_run_changes_nothing(
    run_jobs: Callable[..., Any], compare: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Training that has nothing to skip is bit for bit the same with the guard at work, and without any of it."""
    plain = {**_job("none", tmp_path), "options": None}
    guarded, off = _job("none", tmp_path, "--guard", "skip"), _job("none", tmp_path, "--guard", "off")
    results = run_jobs([plain, guarded, off])
    assert compare(results[0], results[1]) == []
    assert compare(results[0], results[2]) == []


def test_off_says_nothing_about_numbers(run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """With the guard off, a NaN is no finding."""
    job = _job("forward", tmp_path, "--guard", "off")
    run_jobs([job])
    assert [f["code"] for f in _findings(job) if f["code"].startswith("NUM")] == []
