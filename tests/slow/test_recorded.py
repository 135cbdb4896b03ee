"""Recorded jobs on busy machines: what is found in them, and that healthy ones raise no alarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import recordings
from sweep import delayed, judge, usual_step

from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.detectors.slow.slow602_input_bound import InputBound
from ddpdebug.detectors.slow.slow603_slowdown_over_time import SlowdownOverTime
from ddpdebug.schema.finding import Severity

RULES = (Straggler, InputBound, SlowdownOverTime)
FILES = {path.name.partition(".")[0]: path for path in sorted(recordings.FOLDER.glob("*.xz"))}
HEALTHY = [name for name in FILES if name.startswith("healthy")]
#: Steps that a job takes before its fault begins (`job.py`).
BEGINS = 24


def test_there_are_enough_and_they_are_small() -> None:
    """Ten at least, below 300 kB together."""
    assert len(FILES) >= 10
    assert len(HEALTHY) >= 5
    assert sum(path.stat().st_size for path in FILES.values()) < 300_000


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_raises_no_alarm(name: str) -> None:
    """Whatever else the machine does."""
    assert [f.code for f, _ in judge(recordings.read(FILES[name])[1], *RULES) if f.severity >= Severity.WARNING] == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in HEALTHY])
def test_a_fault_is_found(name: str) -> None:
    """With its rank and its phase, and nothing else."""
    about, steps = recordings.read(FILES[name])
    said = judge(steps, *RULES)
    kind = Severity.INFO if about["phase"] in {"work", "pauses"} else Severity.WARNING
    ranks = tuple(steps[0].rows) if about["rank"] is None else (about["rank"],)
    found = [(f.code, f.ranks, f.phase) for f, _ in said if f.severity >= kind]
    assert found == [(about["code"], ranks, about["phase"])]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("slow_") and "a_little" not in name])
def test_a_third_of_a_step_is_found_within_150_steps(name: str) -> None:
    """Of those since the fault has begun."""
    _, steps = recordings.read(FILES[name])
    assert min(at for _, at in judge(steps, Straggler)) <= BEGINS + 150


def test_what_a_rank_costs_is_told_in_words_and_numbers() -> None:
    """As a share of the step, and in this run so far; the newest numbers count."""
    _, steps = recordings.read(FILES["slow_backward"])
    ((finding, _),) = judge(steps, Straggler)
    evidence = finding.evidence
    assert evidence["cost"].startswith(f"{100 * evidence['share']:.0f} % of each step, ")
    assert evidence["cost"].endswith(" s so far")
    whole = sum(max(row.step_seconds for row in step.rows.values()) for step in steps)
    assert 0.05 * whole < evidence["cost_seconds"] < 0.3 * whole
    assert evidence["steps"] > 200
    assert evidence["behind_seconds"] == pytest.approx(0.042, abs=0.012)
    assert {"waits", "machine"} <= evidence.keys()


def test_a_delay_that_is_added_is_waited_for_by_the_others() -> None:
    """The sweep does to a recording what a slow rank does to a job."""
    _, steps = recordings.read(FILES["healthy_busy"])
    rank, begin = 1, steps[5].step
    seconds = 3 * usual_step(steps)
    after = delayed(steps, rank, "forward", seconds, begin)
    assert [step.rows for step in after[:5]] == [step.rows for step in steps[:5]]
    for before, now in zip(steps[5:], after[5:], strict=True):
        longer = {r: now.rows[r].step_seconds - before.rows[r].step_seconds for r in now.rows}
        assert max(longer.values()) <= seconds + 1e-9
        for other in set(now.rows) - {rank}:
            assert now.rows[other].own_seconds == pytest.approx(before.rows[other].own_seconds)
        assert now.rows[rank].own_seconds == pytest.approx(before.rows[rank].own_seconds + seconds)
