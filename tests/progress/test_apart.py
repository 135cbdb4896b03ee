"""Where the notes of ranks part."""

from __future__ import annotations

import pytest

from ddpdebug.progress.apart import data_ended, parted
from ddpdebug.schema.progress import DATA_ENDED, Call, Noted, note_of

_LOOP = (("broadcast", "train.py:10"), ("all_reduce", "train.py:11"))


def _noted(operation: str, number: int, location: str = "train.py:1", shape: str = "", **more: int) -> Noted:
    call = Call(
        group="0",
        number=number,
        operation=operation,
        location=location,
        shapes=(shape,) if shape else (),
        root=more.get("root"),
    )
    return Noted(call=call, step=more.get("step", 0), batches=more.get("batches", 0))


def _loop(steps: int, *, extra_before: int | None = None, skipped: int | None = None) -> list[Noted]:
    """Return the notes of a training: in each step a broadcast and an all_reduce."""
    found: list[Noted] = []
    for step in range(steps):
        if step == extra_before:
            found.append(_noted("broadcast", len(found) + 1, "train.py:99", step=step, batches=step + 1))
        late = skipped is not None and step >= skipped
        for operation, location in _LOOP:
            found.append(_noted(operation, len(found) + 1, location, step=step, batches=step + 1 + late))
    return found


def test_a_note_is_read_as_it_was_written() -> None:
    """What a line of the black box says is what was noted."""
    text = note_of("broadcast", "0", 7, 1, 5, 6, "train.py:3", ("float32 [2]", "int64 []"))
    noted = Noted.read(text)
    assert noted is not None
    assert noted.call == Call(
        group="0", number=7, operation="broadcast", root=1, location="train.py:3", shapes=("float32 [2]", "int64 []")
    )
    assert (noted.step, noted.batches) == (5, 6)
    bare = Noted.read(note_of("barrier", "0", 8, None, 5, 6, None, ()))
    assert bare is not None
    assert (bare.call.root, bare.call.location, bare.call.shapes) == (None, None, ())


@pytest.mark.parametrize("text", ["", "all_reduce", "all_reduce\t0\tx\t\t0\t0\t", "all_red (cut)"])
def test_a_damaged_note_is_none(text: str) -> None:
    """A line that was cut off is left out."""
    assert Noted.read(text) is None


def test_equal_notes_have_not_parted() -> None:
    """Ranks that make the same calls agree, also where one has come further."""
    assert parted({0: _loop(5), 1: _loop(5)}) is None
    assert parted({0: _loop(5), 1: _loop(7)}) is None
    assert parted({0: _loop(5)}) is None
    assert parted({}) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (_noted("all_reduce", 11), _noted("barrier", 11), "operation"),
        (_noted("all_reduce", 11, shape="float32 [8]"), _noted("all_reduce", 11, shape="float32 [9]"), "shape"),
        (_noted("all_reduce", 11, shape="float32 [8]"), _noted("all_reduce", 11, shape="float64 [8]"), "dtype"),
        (_noted("broadcast", 11, root=0), _noted("broadcast", 11, root=1), "root"),
    ],
)
def test_what_does_not_fit_is_found_behind_what_came_since(ours: Noted, theirs: Noted, difference: str) -> None:
    """Of calls that clash the first is told, whatever one rank has called since."""
    known = parted({0: [*_loop(5), ours, _noted("barrier", 12)], 1: [*_loop(5), theirs]})
    assert known is not None
    assert known.difference == difference
    assert known.clash == known.first == {0: ours, 1: theirs}


def test_one_call_more_is_found_where_it_was_made() -> None:
    """A call that pairs up with the next one of its kind is the first difference, not the pair that clashes."""
    known = parted({0: _loop(8), 1: _loop(8, extra_before=5)})
    assert known is not None
    assert known.difference == "operation"
    assert known.first[1].call.location == "train.py:99"
    assert known.first[1].call.number == 11
    assert known.clash[0].call.number == 12


def test_a_step_that_one_rank_skips_is_found_by_its_batches() -> None:
    """All calls fit, but from one on a rank has used one batch more."""
    known = parted({0: _loop(8), 1: _loop(7, skipped=5)})
    assert known is not None
    assert not known.clash
    assert known.difference is None
    assert (known.first[0].step, known.first[0].batches, known.first[1].batches) == (5, 6, 7)


def test_another_line_alone_is_no_difference() -> None:
    """Both branches of a condition may make the same call."""
    assert parted({0: [_noted("barrier", 1, "a.py:1")], 1: [_noted("barrier", 1, "a.py:3")]}) is None


def test_of_calls_with_one_number_the_outer_or_the_later_counts() -> None:
    """What was refused is replaced by what was issued next; calls that torch makes from one do not hide it."""
    refused = [_noted("broadcast", 1, "a.py:1"), _noted("all_reduce", 1, "a.py:2")]
    assert parted({0: refused, 1: [_noted("all_reduce", 1, "a.py:2")]}) is None
    gathers = [_noted("all_gather_object", 1), _noted("all_gather", 1), _noted("all_gather", 2)]
    broadcasts = [_noted("broadcast_object_list", 1), _noted("broadcast", 1), _noted("broadcast", 2)]
    known = parted({0: gathers, 1: broadcasts})
    assert known is not None
    assert [noted.call.operation for noted in known.first.values()] == ["all_gather_object", "broadcast_object_list"]


def test_the_end_of_the_data_counts_until_the_next_call() -> None:
    """A loader that ended before the last calls explains nothing."""
    end = _noted(DATA_ENDED, 0, batches=10)
    assert data_ended([*_loop(2), end], DATA_ENDED) == end
    assert data_ended([end, *_loop(2)], DATA_ENDED) is None
    assert data_ended((), DATA_ENDED) is None
