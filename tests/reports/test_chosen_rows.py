"""What `top` and the report show of very many ranks, of whose rows most steps have a few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdebug.exchange.partial import Partial
from ddpdebug.monitor.many_ranks import chosen_step
from ddpdebug.reports.reading import read_history
from ddpdebug.reports.top.snapshot import from_directory
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.row import Row, encode
from ddpdebug.sinks import RunStarted, StepJudged

_WORLD = 100


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run in each step of which another rank was slow, by 40 ms of 200."""
    sink = RunDirectory(tmp_path, 0)
    config: dict[str, Any] = {}
    sink.write(RunStarted(run_id="r", rank=0, world=_WORLD, directory=tmp_path, config=config, versions={}))
    times = {"step_seconds": 0.2, "forward_seconds": 0.05, "backward_seconds": 0.1}
    for number in range(100, 180):
        whole = Partial()
        for rank in range(_WORLD):
            wait = 0.01 if rank == number - 90 else 0.05
            whole.add_row(encode(Row(rank=rank, step=number, params_after_digest=5, sync_wait_seconds=wait, **times)))
        ((key, part),) = whole.steps.items()
        sink.write(StepJudged(step=chosen_step(key, part)))
    sink.close()
    return tmp_path


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
