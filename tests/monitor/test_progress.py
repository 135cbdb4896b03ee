"""The watch over hangs of one rank, with looks that are given: what it tells, to whom, and when it is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, free_port

from ddpdebug.disk import Disk
from ddpdebug.monitor import progress
from ddpdebug.monitor.progress import ProgressWatch
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.watcher import NoNotes
from ddpdebug.schema.announcements import Announcement, Hang, HangOver
from ddpdebug.schema.progress import Call, RankProgress
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import Waiting

_CALL = Call(group="0", number=6, operation="all_reduce", shapes=("float32 [8]",), location="train.py:41", ranks=(0, 1))


def waits(rank: int, seconds: float, step: int = 5) -> RankProgress:
    """Return the look of a rank that waits in the sixth collective."""
    return RankProgress(rank=rank, step=step, same=seconds, still=seconds, waits=(_CALL,), entered={"0": 6})


def works(rank: int, *, still: float = 0.0, step: int = 5, line: int = 88) -> RankProgress:
    """Return the look of a rank that has not come to it."""
    where: dict[str, Any] = {"place": f"train.py:{line}", "function": "evaluate", "phase": "forward"}
    return RankProgress(rank=rank, step=step, same=still, still=still, entered={"0": 5}, **where)


class Clock:
    """The time, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return it."""
        return self.now


class Rank:
    """A rank whose looks are given, and what it has told."""

    def __init__(self, rank: int, clock: Clock, **options: Any) -> None:
        self.clock, self.seen = clock, works(rank)
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.announced: list[Announcement] = []
        self.fed: list[Announcement] = []
        self.told: list[Waiting] = []
        self.stands_in = 0
        self.notes = NoNotes()
        self.watch = ProgressWatch(
            rank,
            2,
            self,  # type: ignore[arg-type]  # has its one method
            disk=Disk(),
            folder=lambda: None,
            say=lambda kind, **fields: self.said.append((kind, fields)),
            announce=self.announced.append,
            feed=self.fed.append,
            stand_in=self._stand_in,
            tell=self.told.append,
            off=lambda part, text: pytest.fail(f"{part}: {text}"),
            **options,
        )

    def _stand_in(self) -> None:
        self.stands_in += 1

    def look(self) -> RankProgress:
        """Look, as the watcher does."""
        return self.seen

    def hears(self, other: Rank) -> None:
        """Take all that another rank has said."""
        for kind, fields in other.said:
            self.watch.hear(other.watch.rank, kind, json.loads(json.dumps(fields)))
        other.said.clear()

    @property
    def lines(self) -> list[str]:
        """What people have read."""
        return [record.line for record in self.told if record.line]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still until it is moved."""
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


@pytest.fixture
def ranks(clock: Clock) -> tuple[Rank, Rank, Callable[..., None]]:
    """Two ranks, and what lets time pass for both: their looks, and how they then hear of each other."""
    first, second = Rank(0, clock), Rank(1, clock)

    def both(one: RankProgress, other: RankProgress, seconds: float = 1.0) -> None:
        clock.now += seconds
        first.seen, second.seen = one, other
        for rank in (first, second):
            rank.watch.tick((0, 1))
        said = first.said.copy()
        first.hears(second)
        first.said[:] = said
        second.hears(first)

    return first, second, both


def test_a_rank_at_work_is_a_line_and_no_finding(ranks: Any) -> None:
    """One line for each wait, however many lines of the script the rank goes through; and the state while it lasts."""
    first, second, both = ranks
    for number in range(40):
        both(waits(0, 1.0 + number), works(1, line=80 + number))
    assert first.announced == []
    (line,) = first.lines
    assert "rank 0 in all_reduce #6 of float32 [8] at train.py:41" in line
    assert "rank 1 is at work: runs, at train.py:" in line
    assert "(evaluate)" in line
    for rank in (first, second):
        newest = rank.told[-1]
        assert (newest.state, newest.ranks, newest.phase) == (WaitState.AT_WORK, (1,), "forward")
        assert newest.seconds == {0: pytest.approx(40, abs=2)}
        assert len({record.location for record in rank.told if record.state}) == 1  # series do not come and go
    both(works(0, step=6), works(1, step=6))
    both(works(0, step=6), works(1, step=6), 5.0)
    assert first.told[-1] == second.told[-1] == Waiting()
    for number in range(20):
        both(waits(0, 1.0 + number, step=9), works(1, step=9))
    assert len(first.lines) == 2


def test_it_is_a_warning_only_beyond_what_the_run_was_like(clock: Clock) -> None:
    """A minute is not too long, ten times the longest wait that ended well is; the end is told with its duration."""
    rank = Rank(0, clock, patience=Patience(4.0, 2.0), line_seconds=2.0)

    def wait(until: float) -> None:
        for seconds in range(1, int(until) + 1):
            clock.now += 1
            rank.seen = waits(0, float(seconds))
            rank.watch.hear(1, "progress", {"look": to_json(works(1))})
            rank.watch.tick((0, 1))
        clock.now += 5
        rank.seen = works(0, step=6)
        rank.watch.hear(1, "progress", {"look": to_json(works(1, step=6))})
        rank.watch.tick((0, 1))

    wait(3)
    assert rank.announced == []  # ended well after 3 s: up to 6 s are in order from now on
    wait(5)
    assert rank.announced == []  # and up to 10 s
    wait(12)
    hang, over = rank.announced
    assert isinstance(hang, Hang)
    assert (hang.kind, hang.ranks, hang.waited) == ("busy", (1,), 10.0)
    assert isinstance(over, HangOver)
    assert over.number == hang.number
    assert over.seconds == pytest.approx(17)
    assert WaitState.OVERDUE in {record.state for record in rank.told}
    assert rank.told[-1] == Waiting()


def test_a_hang_is_told_and_ends(ranks: Any) -> None:
    """State, place and the ranks that wait, to the sinks of both ranks; nothing once the ranks go on."""
    first, second, both = ranks
    for number in range(12):
        both(waits(0, 1.0 + number), works(1, still=1.0 + number))
    (hang,) = first.announced
    assert isinstance(hang, Hang)
    assert (hang.kind, hang.ranks) == ("stuck", (1,))
    for rank in (first, second):
        newest = rank.told[-1]
        assert (newest.state, newest.ranks, newest.location) == (WaitState.STUCK, (1,), "train.py:88")
    both(works(0, step=6), works(1, step=6))
    both(works(0, step=6), works(1, step=6), 5.0)
    over = first.announced[-1]
    assert isinstance(over, HangOver)
    assert over.number == hang.number
    assert first.told[-1] == second.told[-1] == Waiting()


def test_who_has_spoken_for_rank_0_says_that_it_is_over(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has judged alone while rank 0 was silent; once the ranks talk again, it closes what it has opened."""
    rank = Rank(1, clock)
    seen = {0: progress.Seen(progress=works(0), silent=6.0, kernel="stopped by a signal"), 1: progress.Seen()}
    monkeypatch.setattr(rank.watch, "_seen_from_outside", lambda _, **__: (seen, {0, 1}))
    rank.seen = waits(1, 6.0)
    seen[1] = progress.Seen(progress=rank.seen)
    rank.watch.unanswered(6.0)
    (hang,) = rank.fed
    assert isinstance(hang, Hang)
    assert (hang.kind, hang.ranks, rank.stands_in) == ("silent", (0,), 1)
    assert (rank.told[-1].state, rank.told[-1].alone) == (WaitState.SILENT, True)
    clock.now += 20
    rank.seen = works(1, step=6)
    rank.watch.hear(0, "progress", {"look": to_json(works(0, step=6))})
    rank.watch.tick((0, 1))
    told, over = rank.announced
    assert told == hang
    assert isinstance(over, HangOver)
    assert (over.judge, over.number, over.seconds) == (1, hang.number, pytest.approx(26))
    assert rank.told[-1] == Waiting()
    assert ("waiting", 0) in [(kind, fields.get("state")) for kind, fields in rank.said]


@pytest.mark.parametrize(("reason", "over"), [("finished", True), ("exception: RuntimeError: Timed out", False)])
def test_a_run_that_comes_to_its_end_has_not_waited_for_ever(reason: str, over: bool, clock: Clock) -> None:
    """Also where it ends before the next look; a run that fails of its wait leaves the hang as it is."""
    rank = Rank(0, clock)
    for number in range(12):
        clock.now += 1
        rank.seen = waits(0, 1.0 + number)
        rank.watch.hear(1, "progress", {"look": to_json(works(1, still=1.0 + number))})
        rank.watch.tick((0, 1))
    (hang,) = rank.announced
    rank.watch.close(reason)
    found = [(each.number, round(each.seconds)) for each in rank.fed if isinstance(each, HangOver)]
    assert isinstance(hang, Hang)
    assert found == ([(hang.number, 12)] if over else [])


def test_what_another_rank_says_is_taken_with_ones_own_waiting(clock: Clock) -> None:
    """A rank that does not judge tells its own sinks what was judged, and for how long it has waited itself."""
    rank = Rank(1, clock)
    rank.seen = replace(waits(1, 12.0), rank=1)
    message = {"state": 3, "ranks": [0], "phase": "data", "location": "train.py:33", "line": ""}
    rank.watch.hear(0, "waiting", message)
    rank.watch.tick((0, 1))
    expected = Waiting(state=WaitState.STUCK, ranks=(0,), phase="data", location="train.py:33", seconds={1: 12.0})
    assert rank.told == [expected]


_SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddpdebug.config.settings import Config
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.monitor.progress import ProgressWatch
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.watcher import NoNotes

watch = partial(ProgressWatch, patience=Patience(3.0, 2.0), line_seconds=2.0)
monitor = Monitor(Config(out=Path(sys.argv[1]), metrics="off", every_step=True), progress_watch=watch)
monitor.install()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(rank)
for step in range(8):
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4 and rank == 1:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            sum(range(1000))
del model
monitor.close()
"""


@pytest.mark.jobs
@pytest.mark.slow
def test_a_real_rank_that_works_for_far_longer_than_ever_is_a_warning(tmp_path: Path) -> None:
    """With the limits of a test in the place of a minute: a line first, then HANG501 as a warning, then its end."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    environment = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = tmp_path / "run"
    jobs = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), str(run)],
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    output = [job.communicate(timeout=PATIENCE)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], output
    lines = [json.loads(line) for line in (run / "findings.jsonl").read_text().splitlines()]
    (hang,) = [line for line in lines if line["code"].startswith("HANG")]
    assert (hang["code"], hang["severity"], hang["ranks"]) == ("HANG501", "warning", [1])
    assert hang["evidence"]["waited_seconds"] >= 3.0
    assert hang["evidence"]["ended_after_seconds"] >= 3.0
    (said,) = [line for line in output[0].splitlines() if "others wait, for" in line]
    assert "rank 1 is at work" in said
    assert output[0].index(said) < output[0].index("warning HANG501")
    assert "is over after" in output[0]
    assert not list(run.glob("ranks/*/trouble.jsonl"))
