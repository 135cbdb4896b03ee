"""Whether an epoch's first batches are drawn and left out, by batches and steps alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpdebug.probes.epoch_pace import EpochPace


def _left_out(events: Iterator[str] | str, began: int = 40) -> int:
    """Return what is told of batches (`b`) and steps (`s`) of an epoch."""
    pace, step = EpochPace(began), began
    for event in events:
        if event == "b":
            pace.delivered(step)
        else:
            step += 1
    assert pace.left_out(step) == 0, "one that is broken off may have fetched ahead what it lacks"
    pace.whole = True
    return pace.left_out(step)


@pytest.mark.parametrize(
    ("events", "number"),
    [
        ("bbbbb" + "bs" * 6, 5),
        ("bb" + "bs" * 4, 2),
        ("bbb" + "bbs" * 5, 3),  # two micro-batches a step
        ("bbb" + "bbs" * 5 + "b", 3),  # and one that is left over
        ("bs" * 8, 0),
        ("b" + "bs" * 8, 0),  # one to look at
        ("bbbb" + "bs" * 6 + "ssss", 0),  # fetched ahead
        ("bbb" + "bs" * 2, 0),  # too few to know the pace
        ("bbb" + "bsbbsbsbbs" * 3, 0),  # no pace
        ("bbb" + "bss" * 5, 0),  # several steps a batch
        ("b" * 9, 0),  # an evaluation
        ("", 0),
    ],
)
def test_batches_at_the_beginning(events: str, number: int) -> None:
    """What is fetched ahead is trained on in the end; what has no steady pace is not judged."""
    assert _left_out(events) == number
