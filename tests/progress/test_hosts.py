"""Ranks of several hosts, whose black boxes cannot be read: they hear of each other through the job's store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hangs

_SCRIPT = hangs.SCRIPT.with_name("on_hosts.py")
_LIMIT = 240.0


def _run(hosts: str, rank: int) -> hangs.Result:
    world = len(hosts.split(","))
    return hangs.run("sigstop", rank, world=world, seconds=_LIMIT, limit=_LIMIT, script=(str(_SCRIPT), hosts))


@pytest.mark.hangs
def test_the_lowest_rank_judges_by_what_the_other_host_tells() -> None:
    """What the kernel shows of a stopped rank, and its line, come from a rank beside it."""
    found = _run("0,0,1,1", 3).first
    assert (found["code"], found["ranks"], found["phase"]) == ("HANG501", [3], "interpreter")
    assert found["location"].endswith(f"stops.py:{hangs.line_of('stops', 'sigstop')}")
    assert found["evidence"]["hang"].startswith("0:")
    assert "stopped by a signal" in found["evidence"]["missing"]["3"]


@pytest.mark.hangs
@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_rank_alone_on_its_host(rank: int) -> None:
    """Nobody knows why it is silent, and that is said; also where it hosts the store, which is silent with it."""
    found = _run("0,1", rank).first
    assert (found["code"], found["ranks"], found["phase"]) == ("HANG501", [rank], "interpreter")
    assert found["evidence"]["hang"].startswith(f"{1 - rank}:")
    assert "not known" in found["evidence"]["missing"][str(rank)]
