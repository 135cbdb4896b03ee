"""From when on a rank at work is waited for too long: by the waits of its own run."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ddpdebug.progress.patience import Patience


def test_five_minutes_are_never_too_long() -> None:
    """Whatever the run was like: nothing has been waited for yet."""
    patience = Patience()
    assert patience.limit == 300.0
    patience.waits(2.0)
    patience.ended()
    assert patience.limit == 300.0


def test_ten_times_the_longest_that_ended_well() -> None:
    """A run that evaluates for a minute on one rank may do so for ten."""
    patience = Patience()
    for seconds in (1.0, 12.0, 60.0):
        patience.waits(seconds)
    assert patience.limit == 300.0  # it has not ended
    patience.ended()
    assert (patience.longest, patience.limit) == (60.0, 600.0)
    patience.waits(4.0)
    patience.ended()
    assert patience.limit == 600.0


def test_a_shorter_wait_is_another_one() -> None:
    """That the first one has ended was not seen in between."""
    patience = Patience()
    patience.waits(30.0)
    patience.waits(1.5)
    assert patience.longest == 30.0
    patience.broken()
    patience.ended()
    assert patience.longest == 30.0


def test_a_wait_that_ended_badly_allows_nothing() -> None:
    """The rank was stuck, or has left, before it went on."""
    patience = Patience()
    patience.waits(500.0)
    patience.broken()
    patience.ended()
    assert patience.limit == 300.0


@given(st.lists(st.floats(0, 1e6)))
def test_the_limit_only_grows(waits: list[float]) -> None:
    """What a run was once patient with, it stays patient with."""
    patience, before = Patience(), 0.0
    for seconds in waits:
        patience.waits(seconds)
        assert patience.limit >= before
        before = patience.limit
        patience.ended()
    assert patience.limit == max(300.0, 10 * max(waits, default=0.0))
