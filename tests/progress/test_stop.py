"""`--on-hang stop` with real ranks: who leaves, with which status, and what is on disk then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job, Result

pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.timeout(1800)]


def _job(kind: str, rank: int, world: int = 2, seconds: float = 600.0, stays: tuple[int, ...] = ()) -> Job:
    common = {"whole": True, "options": ("--on-hang", "stop")}
    return Job(kind=kind, rank=rank, world=world, seconds=seconds, stays=stays, **common)


def _ends(result: Result) -> dict[int, str]:
    files = Path(result.folder).glob("ranks/*/outcome.json")
    return {int(file.parent.name): json.loads(file.read_text(encoding="utf-8"))["reason"] for file in files}


def _said(result: Result) -> list[int]:
    return [rank for rank, text in enumerate(result.output) if f"rank {rank} leaves with exit status 4" in text]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (_job("lock", 1), "HANG501"),
        (_job("lock", 0, world=4), "HANG501"),
        (_job("operation", 2, world=4), "HANG502"),
    ],
)
def test_all_live_ranks_leave(job: Job, code: str, result: Result) -> None:
    """Each with status 4, a line, its stacks and why it ended."""
    assert result.first.get("code") == code, result.output
    assert result.statuses == [4] * job.world, result.output
    assert _said(result) == list(range(job.world))
    ends = _ends(result)
    assert len(ends) == job.world
    assert all(reason.startswith(f"hang: {code}") for reason in ends.values()), ends
    for rank in range(job.world):
        assert "File" in (Path(result.folder) / "ranks" / str(rank) / "stacks.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("job", [_job("sigstop", 0, world=world, stays=(0,)) for world in (2, 4)])
def test_rank_0_is_silent(job: Job, result: Result) -> None:
    """The others leave by themselves, by what one of them has written, and say that rank 0 cannot."""
    assert result.statuses == [None] + [4] * (job.world - 1), result.output  # who is stopped is ended from outside
    assert _said(result) == list(range(1, job.world))
    assert all("rank 0 cannot leave by itself" in text for text in result.output[1:])
    assert 0 not in _ends(result)


@pytest.mark.parametrize(("job", "status"), [(_job("sigkill", 0, world=4), -9), (_job("return", 0, world=4), 0)])
def test_rank_0_is_missing(job: Job, status: int, result: Result) -> None:
    """Where its end throws nobody out, the others leave for it; where it does, they end by their own exception."""
    assert (result.first.get("code"), result.first.get("ranks")) == ("HANG503", [0]), result.output
    assert result.statuses[0] == status
    assert set(result.statuses[1:]) <= {1, 4}, result.output
    assert _ends(result).keys() >= {1, 2, 3}


@pytest.mark.parametrize("job", [_job("sigstop", 1, seconds=8)])
def test_a_hang_that_ends_by_itself_is_not_stopped(job: Job, result: Result) -> None:
    """A process that was stopped for eight seconds trains on, and the finding says how long it took."""
    assert result.statuses == [0, 0], result.output
    assert all("ended_after_seconds" in finding["evidence"] for finding in result.findings), result.findings


@pytest.mark.parametrize("job", [_job("writes", 0, seconds=25)])
def test_a_rank_at_work_is_not_stopped(job: Job, result: Result) -> None:
    """However long the others wait for it."""
    assert (result.statuses, result.findings) == ([0, 0], []), result.output
