"""A job needs no more memory with ddpdebug than its own share and the bound of what is kept; what it frees is free."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddpdebug.probes.holding import BOUND

_MIB = 1 << 20
#: What ddpdebug itself has of its code and of its records, in MiB, and what runs of the same program differ by.
_OWN, _NOISE = 28, 4
_SITUATIONS = [
    "accumulation", "uneven", "one_huge", "scaler", "token_ids", "dictionaries", "views", "worker", "losses_kept",
    "evaluation", "many", "clipped", "raw",
]  # fmt: skip
_MODES: dict[str, list[str] | None] = {
    "plain": None,
    "default": [],
    "every step": ["--every-step"],
    "keeps nothing": ["--keep-inputs=0"],
}


@pytest.fixture(scope="module")
def results(run_jobs: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Run all situations in one process for each mode."""
    jobs = [{"script": "peak.py", "ranks": 1, "options": options} for options in _MODES.values()]
    found = {}
    for mode, (rank,) in zip(_MODES, run_jobs(jobs), strict=True):
        assert rank["status"] == 0, rank["err"]
        assert "switched itself off" not in rank["err"]
        rows = [json.loads(line) for line in rank["out"].splitlines()]
        found[mode] = {row["name"]: row for row in rows}
        assert list(found[mode]) == _SITUATIONS
    return found


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in _MODES if mode != "plain"])
@pytest.mark.parametrize("situation", _SITUATIONS)
def test_memory(situation: str, mode: str, results: dict[str, dict[str, Any]]) -> None:
    """The peak is the plain one and a constant; memory that the job has let go stays within the bound."""
    plain, watched = results["plain"][situation], results[mode][situation]
    bound = 0 if mode == "keeps nothing" else BOUND
    assert watched["alive"] <= plain["alive"] + bound
    assert watched["objects"] == plain["objects"] == 0
    assert watched["peak"] <= plain["peak"] + _OWN + _NOISE + bound // _MIB


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.slow
def test_what_fits_is_kept(results: dict[str, dict[str, Any]]) -> None:
    """The comparison means something: batches below the bound are there for a replay."""
    assert BOUND // 2 < results["default"]["token_ids"]["alive"] <= BOUND
    assert results["keeps nothing"]["token_ids"]["alive"] == 0
