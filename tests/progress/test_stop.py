"""`--on-hang stop` with real ranks: who leaves, with which status, and what is on disk then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from hangs import Result, run

_STOP = ("--on-hang", "stop")


def _ends(folder: Path) -> dict[int, str]:
    files = folder.glob("out/ranks/*/outcome.json")
    return {int(file.parent.name): json.loads(file.read_text(encoding="utf-8"))["reason"] for file in files}


def _said(result: Result) -> list[int]:
    return [rank for rank, text in enumerate(result.output) if f"rank {rank} leaves with exit status 4" in text]


@pytest.mark.hangs
@pytest.mark.parametrize(
    "kind, world, rank, code",
    [("lock", 2, 1, "HANG501"), ("lock", 4, 0, "HANG501"), ("operation", 4, 2, "HANG502"), ("return", 4, 0, "HANG503")],
)
def test_all_live_ranks_leave(kind: str, world: int, rank: int, code: str, tmp_path: Path) -> None:
    """Each with status 4, a line, its stacks and why it ended; a rank that had ended well stays so."""
    result = run(kind, rank, world=world, seconds=300, limit=300, whole=True, folder=tmp_path, options=_STOP)
    assert result.first.get("code") == code, result.output
    live = [one for one in range(world) if kind != "return" or one != rank]
    assert result.statuses == [4 if one in live else 0 for one in range(world)], result.output
    assert _said(result) == live
    ends = _ends(tmp_path)
    assert all(ends[one].startswith(f"hang: {code}") for one in live), ends
    for one in live:
        assert "File" in (tmp_path / "out" / "ranks" / str(one) / "stacks.txt").read_text(encoding="utf-8")


@pytest.mark.hangs
@pytest.mark.parametrize("world", [2, 4])
def test_rank_0_is_silent(world: int, tmp_path: Path) -> None:
    """The others leave by themselves, by what one of them has written, and say that rank 0 cannot."""
    result = run("sigstop", 0, world=world, seconds=500, limit=90, whole=True, folder=tmp_path, options=_STOP)
    assert result.statuses[1:] == [4] * (world - 1), result.output
    assert result.statuses[0] == -9  # the test's own
    assert _said(result) == list(range(1, world))
    assert all("rank 0 cannot leave by itself" in text for text in result.output[1:])
    assert 0 not in _ends(tmp_path)


@pytest.mark.hangs
def test_rank_0_is_missing(tmp_path: Path) -> None:
    """Where its end throws nobody out, the others leave for it; where it does, they end by their own exception."""
    result = run("sigkill", 0, world=4, seconds=300, limit=300, whole=True, folder=tmp_path, options=_STOP)
    assert result.statuses[0] == -9
    assert set(result.statuses[1:]) <= {1, 4}, result.output
    assert len(_ends(tmp_path)) == 3


@pytest.mark.hangs
def test_a_hang_that_ends_by_itself_is_not_stopped(tmp_path: Path) -> None:
    """A process that was stopped for eight seconds trains on, and the finding says how long it took."""
    result = run("sigstop", 1, seconds=8, limit=300, whole=True, folder=tmp_path, options=_STOP)
    assert result.statuses == [0, 0], result.output
    assert all("ended_after_seconds" in finding["evidence"] for finding in result.findings), result.findings


@pytest.mark.hangs
def test_a_rank_at_work_is_not_stopped(tmp_path: Path) -> None:
    """However long the others wait for it."""
    result = run("writes", 0, seconds=25, limit=300, whole=True, folder=tmp_path, options=_STOP)
    assert (result.statuses, result.findings) == ([0, 0], []), result.output
