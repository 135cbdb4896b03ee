"""Ranks whose calls part, with real ranks: what the notes say of it, also where gloo ends a rank within moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Result, line_of

from ddpdebug.progress import black_box
from ddpdebug.progress.apart import parted
from ddpdebug.schema.progress import Noted

pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.timeout(1800)]


def _record(size: int) -> tuple[tuple[str, str], ...]:
    return (("TORCH_FR_BUFFER_SIZE", str(size)),)


def _evidence(result: Result, code: str) -> dict[str, Any]:
    assert result.findings, result.output
    assert result.first["code"] == code, result.findings
    found: dict[str, Any] = result.first["evidence"]
    return found


@pytest.mark.parametrize("job", [Job(kind="shape", rank=1), Job(kind="dtype", rank=0), Job(kind="root", rank=1)])
def test_calls_that_do_not_fit_are_named_with_line_and_difference(job: Job, result: Result) -> None:
    """Also after one rank was ended by SIGABRT, and the other by a closed connection."""
    evidence = _evidence(result, "HANG502")
    line = f"stops.py:{line_of('stops', job.kind)}"
    assert evidence["difference"] == job.kind
    assert sorted(evidence["calls"]) == ["0", "1"]
    assert all(line in call for call in evidence["calls"].values())
    assert result.first["ranks"] == [0, 1]
    assert result.first["step"] == 5


@pytest.mark.parametrize("job", [Job(kind="extra", environ=_record(size)) for size in (2000, 0)])
def test_one_call_more_is_found_where_it_was_made(job: Job, result: Result) -> None:
    """A call that pairs up with the next is named, and not only the pair that clashed; torch's record is not needed."""
    first = _evidence(result, "HANG502")["first_difference"]
    assert f"stops.py:{line_of('stops', job.kind)}" in first["1"]
    assert f"stops.py:{line_of('other', job.kind)}" in first["0"]


@pytest.mark.smoke
@pytest.mark.parametrize("job", [Job(kind="forward")])
def test_one_forward_more_is_a_mismatch(job: Job, result: Result) -> None:
    """A forward with gradients through DDP on one rank broadcasts buffers once more."""
    first = _evidence(result, "HANG502")["first_difference"]
    assert f"stops.py:{line_of('stops', job.kind)}" in first["1"]


@pytest.mark.parametrize("job", [Job(kind="lock", environ=_record(0))])
def test_a_rank_that_waits_without_torchs_record_is_found(job: Job, result: Result) -> None:
    """Where the record is switched off, counts and calls come from the notes."""
    assert (result.first.get("code"), result.first.get("ranks")) == ("HANG501", [1])
    assert result.first["location"].endswith(f"stops.py:{line_of('stops', job.kind)}")


@pytest.mark.parametrize("job", [Job(kind="few_messages", rank=2, world=3)])
def test_messages_do_not_shift_the_ranks_counts(job: Job, result: Result) -> None:
    """Three ranks that have sent each other another number of messages are compared all the same."""
    assert (result.first.get("code"), result.first.get("ranks")) == ("HANG501", [job.rank])


@pytest.mark.parametrize("job", [Job(kind="segv")])
def test_a_rank_that_was_killed_is_no_mismatch(job: Job, result: Result) -> None:
    """Where the calls fit, the one that was killed is the lost one."""
    assert "difference" not in _evidence(result, "HANG503")
    assert result.first["ranks"] == [job.rank]


@pytest.mark.parametrize("job", [Job(kind="skip", whole=True)])
def test_a_step_left_out_is_dated(job: Job, result: Result) -> None:
    """A rank that left one batch out ends a step early, and what is on disk says since when the ranks were apart."""
    notes = {}
    for rank in range(job.world):
        box = black_box.read(Path(result.folder) / "ranks" / str(rank) / black_box.NAME)
        assert box is not None
        notes[rank] = [noted for note in box.notes if (noted := Noted.read(note.text)) is not None]
    known = parted(notes)
    assert known is not None
    assert not known.clash
    assert [(known.first[rank].step, known.first[rank].batches) for rank in range(2)] == [(5, 6), (5, 7)]


@pytest.mark.parametrize("job", [Job(kind="eval", whole=True)])
def test_an_evaluation_through_ddp_without_gradients_is_none(job: Job, result: Result) -> None:
    """DDP broadcasts buffers in it, and leaves that out in the next forward: the ranks' calls stay the same."""
    assert result.findings == []
    assert result.statuses == [0, 0]
