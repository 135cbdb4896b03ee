"""What `top` and the report show of very many ranks, of whose rows most steps have a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.exchange.partial import Partial
from ddpdebug.monitor.many_ranks import chosen_step
from ddpdebug.reports.page import report
from ddpdebug.reports.reading import read_history
from ddpdebug.reports.top.snapshot import from_directory
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.row import Row, encode
from ddpdebug.schema.step import Step
from ddpdebug.sinks import RunStarted, StepJudged

_WORLD = 100


def _write(directory: Path, slow: Callable[[int], int], whole: Collection[int] = ()) -> Path:
    """Write a run in each step of which one rank was slow, by 40 ms of 200; of these steps all rows are kept."""
    sink = RunDirectory(directory, 0)
    config: dict[str, Any] = {}
    sink.write(RunStarted(run_id="r", rank=0, world=_WORLD, directory=directory, config=config, versions={}))
    times = {"step_seconds": 0.2, "forward_seconds": 0.05, "backward_seconds": 0.1}
    for number in range(100, 180):
        part, rows = Partial(), {}
        for rank in range(_WORLD):
            wait = 0.01 if rank == slow(number) else 0.05
            rows[rank] = Row(rank=rank, step=number, params_after_digest=5, sync_wait_seconds=wait, **times)
            part.add_row(encode(rows[rank]))
        ((key, chosen),) = part.steps.items()
        step = Step(step=number, optimizer=0, world=_WORLD, rows=rows)
        sink.write(StepJudged(step=step if number in whole else chosen_step(key, chosen)))
    sink.close()
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run in each step of which another rank was slow."""
    return _write(tmp_path, lambda number: number - 90)


def test_top_takes_no_rank_for_slow_because_its_row_was_chosen(directory: Path) -> None:
    """Each was the last in one of the newest 64 steps, which is a share of these and no habit."""
    snapshot = from_directory(directory)
    assert (snapshot.world, len(snapshot.ranks)) == (_WORLD, _WORLD)
    slow = [view for view in snapshot.ranks if view.last > 0]
    assert len(slow) == 64
    assert {round(view.last * 64) for view in slow} == {1}
    assert {round(view.cost, 6) for view in slow} == {round(0.04 / 64 / 0.2, 6)}
    assert snapshot.straggler is None
    assert [view.rank for view in snapshot.ranks if view.own_seconds > 0] == [0]


def test_the_report_has_the_parts_of_an_ordinary_rank(directory: Path) -> None:
    """Not the mean over those that were slow."""
    history = read_history(directory)
    assert history.steps == 80
    assert {round(value, 6) for _, value in history.series["waiting"]} == {0.05}


def test_the_report_takes_no_rank_for_slow_because_its_row_was_chosen(directory: Path) -> None:
    """Each was last once, and cost what it did; how slow ranks are beside the others no step tells."""
    pace = read_history(directory).pace
    assert (pace.steps, pace.whole, pace.ranks) == (80, 0, _WORLD)
    assert (pace.step_seconds, pace.waiting) == pytest.approx((0.2, 0.25))
    assert pace.totals()[0].rank == 10
    slow = [one for one in pace.totals() if one.cost]
    assert [one.rank for one in slow] == [*range(10, 90)]
    assert {(round(one.cost, 6), round(one.share, 6), one.last) for one in slow} == {(0.04, 0.0025, 1 / 80)}
    assert all(math.isnan(one.own) for one in pace.totals())
    assert not any(cells for *_, cells in pace.spans())


def test_ranks_are_compared_in_the_steps_that_have_the_rows_of_all(tmp_path: Path) -> None:
    """In these a rank that is always slow is behind all others; who was slow in the steps between is not."""
    whole = range(100, 180, 20)
    _write(tmp_path, lambda number: 37 if number in whole or number % 2 else number - 90, whole)
    pace = read_history(tmp_path).pace
    assert (pace.steps, pace.whole) == (80, 4)
    first, *others = pace.totals()
    assert (first.rank, first.cost, first.last) == (37, pytest.approx(44 * 0.04), 44 / 80)
    assert (first.own, first.excess) == pytest.approx((0.19, 0.2))
    assert {(round(one.own, 6), round(one.excess, 6)) for one in others} == {(0.15, 0)}
    drawn = {begin: cells for begin, _, cells in pace.spans() if cells}
    assert set(drawn) == set(whole)
    assert {cell.rank for cells in drawn.values() for cell in cells.values() if cell.excess > cell.noise} == {37}
    assert "Ranks are compared in 4 steps" in report(tmp_path)
