"""The end of a run: what the last step has left is compared, whatever the end is like; what comes after it is not.

Only the first steps are checked in full here, so that what is found was found at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.diagnosis.rejudge import rejudge
from ddpdebug.schema.finding import Severity

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

#: The sampled tier runs in four steps only.
_SAMPLED = "from ddpdebug.monitor.sampling import Schedule; Schedule.due = lambda self, optimizer, step: step < 4"

#: Ways to end, with the exit status that plain Python gives each rank.
ENDINGS = {
    "globals": (0, 0),
    "globals-destroy": (0, 0),
    "main": (0, 0),
    "main-destroy": (0, 0),
    "destroy-in-main": (0, 0),
    "deleted": (0, 0),
    "exit": (3, 3),
    "sigterm": (5, 5),
}
FAULTS = ("edit", "flip", "in-step-8", "in-last-but-one", "in-last", "edit-after-last", "state")
ON_PURPOSE = (
    *("none", "load", "data-copy", "data-set", "half", "clamp", "prune", "fine-tune", "rebuild", "optimizer-load"),
    *("evaluate", "uneven"),
)
FOUND = [*((ending, "edit") for ending in ENDINGS), *(("main", fault) for fault in FAULTS if fault != "edit")]
SILENT = [
    *(("globals-destroy", event) for event in ON_PURPOSE),
    *(("main", event) for event in ("none", "data-copy", "clamp")),
    ("os._exit", "none"),
]


def _job(ending: str, event: str, folder: Path | None, *more: str) -> dict[str, Any]:
    options = None if folder is None else ["--metrics", "off", "--quiet", "--out", str(folder), *more]
    inject = {str(rank): _SAMPLED for rank in range(2)}
    return {"script": "last_steps.py", "args": [ending, event], "options": options, "inject": inject, "patient": True}


def _findings(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "findings.jsonl").read_text().splitlines()
    return [finding for line in lines if (finding := json.loads(line))["severity"] != "info"]


@pytest.fixture(scope="module")
def ends(
    run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, selected: set[tuple[str, ...]]
) -> dict[tuple[str, ...], Any]:
    """Plain and watched runs of the selected ways to end."""
    out = tmp_path_factory.mktemp("runs")
    wanted = sorted(selected)
    jobs = [_job(*pair, None if plain else out / "-".join(pair)) for pair in wanted for plain in (True, False)]
    results = run_jobs(jobs)
    pairs = zip(results[::2], results[1::2], strict=True)
    return {pair: (*both, out / "-".join(pair)) for pair, both in zip(wanted, pairs, strict=True)}


@pytest.mark.parametrize(("ending", "event"), FOUND)
def test_ranks_that_have_parted_are_found(
    ending: str, event: str, ends: dict[tuple[str, ...], Any], compare: Callable[..., list[str]]
) -> None:
    """Whatever happened since the last full check, and wherever the model is when the script ends."""
    plain, watched, folder = ends[ending, event]
    assert compare(plain, watched) == []
    assert tuple(rank["status"] for rank in watched) == ENDINGS[ending]
    codes = [finding["code"] for finding in _findings(folder)]
    assert codes in (["RANK101"], ["RANK103"]) if event == "state" else codes == ["RANK101"]
    (finding,) = _findings(folder)
    assert finding["step"] == 11
    assert finding["phase"] is None
    if finding["code"] == "RANK101":
        assert finding["subject"][0] == "0.weight"
        assert finding["evidence"]["equal_before_step"] == 3
    if event in {"edit", "edit-after-last"}:
        assert finding["evidence"]["index"] == [3, 5]
    again = [(f.code, f.step, f.subject, f.phase) for f in rejudge(folder) if f.severity >= Severity.WARNING]
    assert again == [(finding["code"], 11, tuple(finding["subject"]), None)]


@pytest.mark.parametrize(("ending", "event"), SILENT)
def test_what_comes_after_the_last_step_is_no_finding(
    ending: str, event: str, ends: dict[tuple[str, ...], Any], compare: Callable[..., list[str]]
) -> None:
    """Rank 0 may load the best weights, average, round, cut and train on: it is done with the other ranks."""
    plain, watched, folder = ends[ending, event]
    assert compare(plain, watched) == []
    assert [finding["code"] for finding in _findings(folder) if finding["code"] != "RANK112"] == []
