"""Random numbers that ranks draw alike are told where they matter, in real jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

#: What is drawn -> (place, severity, whether all names of generators begin so) of what is told.
TOLD = {
    "torch": {("loop", "warning", "torch")},
    "dropout": {("loop", "warning", "torch"), ("forward", "info", "")},
    "random": {("loop", "warning", "random")},
    "held": {("loop", "warning", "rng (numpy)")},
    "loading": {("loading", "info", "random")},
    "by rank": set(),
    "purpose": set(),
    "nothing": set(),
}


@pytest.fixture(scope="module")
def found(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[tuple[str, ...]]]:
    """Place, severity and generators of the findings of each job."""
    out = tmp_path_factory.mktemp("runs")
    options = ["--metrics", "off", "--quiet", "--every-step", "--out"]
    jobs = [{"script": "draws.py", "args": [what], "options": [*options, str(out / what)]} for what in TOLD]
    results = run_jobs(jobs)
    assert [result["status"] for ranks in results for result in ranks] == [0] * 2 * len(TOLD)
    return {what: {*_random(out / what)} for what in TOLD}


def _random(folder: Path) -> list[tuple[str, ...]]:
    lines = (folder / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    findings = [finding for line in lines if (finding := json.loads(line))["code"] == "RANK110"]
    return [(finding["phase"], finding["severity"], " ".join(finding["subject"])) for finding in findings]


@pytest.mark.parametrize("what", TOLD)
def test_what_is_drawn_alike_is_told(found: dict[str, set[tuple[str, ...]]], what: str) -> None:
    """As a warning where it is computed with, as a hint where that is not known, and not where it is meant so."""
    assert found[what] == TOLD[what]
