"""Ranks whose calls part, with real ranks: what the notes say of it, also where gloo ends a rank within moments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.progress import black_box
from ddpdebug.progress.apart import parted
from ddpdebug.schema.progress import Noted

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hangs import Result, line_of, run

pytestmark = [pytest.mark.jobs, pytest.mark.hangs]

_LIMIT = 300.0  # of a machine that does much else


def _evidence(result: Result, code: str) -> dict[str, Any]:
    assert result.findings, result.output
    assert result.first["code"] == code, result.findings
    found: dict[str, Any] = result.first["evidence"]
    return found


@pytest.mark.parametrize(("kind", "victim"), [("shape", 1), ("dtype", 0), ("root", 1)])
def test_calls_that_do_not_fit_are_named_with_line_and_difference(kind: str, victim: int) -> None:
    """Also after one rank was ended by SIGABRT, and the other by a closed connection."""
    result = run(kind, victim, limit=_LIMIT)
    evidence = _evidence(result, "HANG502")
    line = f"stops.py:{line_of('stops', kind)}"
    assert evidence["difference"] == kind
    assert sorted(evidence["calls"]) == ["0", "1"]
    assert all(line in call for call in evidence["calls"].values())
    assert result.first["ranks"] == [0, 1]
    assert result.first["step"] == 5


@pytest.mark.parametrize("record", ["2000", "0"])
def test_one_call_more_is_found_where_it_was_made(record: str) -> None:
    """A call that pairs up with the next is named, and not only the pair that clashed; torch's record is not needed."""
    result = run("extra", 1, limit=_LIMIT, environ={"TORCH_FR_BUFFER_SIZE": record})
    first = _evidence(result, "HANG502")["first_difference"]
    assert f"stops.py:{line_of('stops', 'extra')}" in first["1"]
    assert f"stops.py:{line_of('other', 'extra')}" in first["0"]


def test_one_forward_more_is_a_mismatch() -> None:
    """A forward with gradients through DDP on one rank broadcasts buffers once more."""
    first = _evidence(run("forward", 1, limit=_LIMIT), "HANG502")["first_difference"]
    assert f"stops.py:{line_of('stops', 'forward')}" in first["1"]


def test_a_rank_that_waits_without_torchs_record_is_found() -> None:
    """Where the record is switched off, counts and calls come from the notes."""
    result = run("lock", 1, limit=_LIMIT, seconds=100, environ={"TORCH_FR_BUFFER_SIZE": "0"})
    assert (result.first.get("code"), result.first.get("ranks")) == ("HANG501", [1])
    assert result.first["location"].endswith(f"stops.py:{line_of('stops', 'lock')}")


def test_messages_do_not_shift_the_ranks_counts() -> None:
    """Three ranks that have sent each other another number of messages are compared all the same."""
    result = run("few_messages", 2, world=3, limit=_LIMIT, seconds=100)
    assert (result.first.get("code"), result.first.get("ranks")) == ("HANG501", [2])


def test_a_rank_that_was_killed_is_no_mismatch() -> None:
    """Where the calls fit, the one that was killed is the lost one."""
    result = run("segv", 1, limit=_LIMIT)
    assert "difference" not in _evidence(result, "HANG503")
    assert result.first["ranks"] == [1]


def test_a_step_left_out_is_dated(tmp_path: Path) -> None:
    """A rank that left one batch out ends a step early, and what is on disk says since when the ranks were apart."""
    run("skip", 1, limit=_LIMIT, whole=True, folder=tmp_path)
    notes = {}
    for rank in range(2):
        box = black_box.read(tmp_path / "out" / "ranks" / str(rank) / black_box.NAME)
        assert box is not None
        notes[rank] = [noted for note in box.notes if (noted := Noted.read(note.text)) is not None]
    known = parted(notes)
    assert known is not None
    assert not known.clash
    assert [(known.first[rank].step, known.first[rank].batches) for rank in range(2)] == [(5, 6), (5, 7)]


def test_an_evaluation_through_ddp_without_gradients_is_none() -> None:
    """DDP broadcasts buffers in it, and leaves that out in the next forward: the ranks' calls stay the same."""
    result = run("eval", 1, limit=_LIMIT, whole=True)
    assert result.findings == []
    assert result.statuses == [0, 0]
