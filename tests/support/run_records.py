"""A run by its records, as sinks get them: two ranks, one finding."""

from __future__ import annotations

from pathlib import Path

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import RunEnded, RunStarted, StepJudged

FINDING = Finding(
    code="RANK101",
    severity=Severity.CRITICAL,
    title="parameters differ between ranks",
    step=57,
    last_step=57,
    ranks=(2,),
    subject=("layers.3.fc.weight",),
    evidence={"differing": 3},
    time="2026-11-21T02:09:00Z",
    run="r1",
    id="RANK101-1",
)
ENDED = RunEnded(reason="finished", exit_code=0, steps={0: 3}, time="2026-11-21T02:10:00Z")


def started(directory: Path, rank: int = 0, run_id: str = "r1") -> RunStarted:
    """Build the first record."""
    return RunStarted(
        run_id=run_id,
        rank=rank,
        world=2,
        directory=directory,
        config={"budget": 0.01, "out": directory},
        versions={"torch": "2.13.0"},
        command=("train.py", "--lr", "1e-3"),
        time="2026-11-21T02:08:00Z",
    )


def judged(step: int) -> StepJudged:
    """Build a step of two ranks."""
    rows = {rank: Row(rank=rank, step=step, loss=1.5, params_after_digest=Digest(7)) for rank in (0, 1)}
    return StepJudged(step=Step(step=step, optimizer=0, world=2, rows=rows))
