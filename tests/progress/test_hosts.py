"""Ranks of several hosts, whose black boxes cannot be read: they hear of each other through the job's store."""

from __future__ import annotations

import pytest
from jobs import Job, Result, line_of

pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("job", [Job(kind="sigstop", rank=3, world=4, hosts="0,0,1,1")])
def test_the_lowest_rank_judges_by_what_the_other_host_tells(job: Job, result: Result) -> None:
    """What the kernel shows of a stopped rank, and its line, come from a rank beside it."""
    found = result.first
    assert (found["code"], found["ranks"], found["phase"]) == ("HANG501", [3], "interpreter")
    assert found["location"].endswith(f"stops.py:{line_of('stops', 'sigstop')}")
    assert found["evidence"]["hang"].startswith("0:")
    assert "stopped by a signal" in found["evidence"]["missing"]["3"]


@pytest.mark.parametrize("job", [Job(kind="sigkill", rank=rank, hosts="0,1") for rank in (0, 1)])
def test_a_rank_that_was_alone_on_its_host_has_gone(job: Job, result: Result) -> None:
    """By elimination: nobody can see its process, and all others have lost their connection."""
    found = result.first
    assert (found["code"], found["ranks"]) == ("HANG503", [job.rank])
    assert "out of reach" in found["evidence"]["missing"][str(job.rank)]


@pytest.mark.parametrize("job", [Job(kind="sigstop", rank=rank, hosts="0,1") for rank in (0, 1)])
def test_a_silent_rank_alone_on_its_host(job: Job, result: Result) -> None:
    """Nobody knows why it is silent, and that is said; also where it hosts the store, which is silent with it."""
    found = result.first
    assert (found["code"], found["ranks"], found["phase"]) == ("HANG501", [job.rank], "interpreter")
    assert found["evidence"]["hang"].startswith(f"{1 - job.rank}:")
    assert "not known" in found["evidence"]["missing"][str(job.rank)]
