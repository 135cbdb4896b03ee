"""Who keeps the others waiting, with literals."""

from __future__ import annotations

import pytest

from ddpdebug.schema.pace import behind, costs, own_times
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step


def test_own_times_leave_out_ranks_whose_time_is_unknown() -> None:
    """The wait for others is not a rank's own."""
    rows = {
        0: Row(step_seconds=0.5, sync_wait_seconds=0.2),
        1: Row(rank=1, step_seconds=0.5, backward_seconds=0.0),
        2: Row(rank=2),
        3: Row(
            rank=3, step_seconds=60.0, backward_seconds=0.0, flags=int(Flag.FIRST)
        ),  # nor is the start of the script
    }
    found = own_times(Step(step=3, optimizer=0, world=4, rows=rows))
    assert found == {0: pytest.approx(0.3), 1: 0.5}


def test_a_rank_is_measured_against_the_median_of_the_others() -> None:
    """One that is slow does not move its own measure; one rank alone has nothing to be measured against."""
    found = behind({0: 1.0, 1: 1.1, 2: 3.0, 3: 0.9})
    assert found == {0: pytest.approx(-0.1), 1: pytest.approx(0.1), 2: pytest.approx(2.0), 3: pytest.approx(-0.2)}
    assert behind({0: 1.0}) == {}


def test_only_the_slowest_rank_costs_anything() -> None:
    """The step would end when the second of them is done."""
    assert costs({0: 1.0, 1: 1.1, 2: 3.0}) == {0: 0.0, 1: 0.0, 2: pytest.approx(1.9)}
    assert costs({0: 1.0, 1: 1.0}) == {0: 0.0, 1: 0.0}
    assert costs({0: 1.0}) == costs({}) == {}
