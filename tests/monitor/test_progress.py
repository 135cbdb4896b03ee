"""The watch over hangs of one rank, with looks that are given: what it tells, to whom, and when it is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, free_port, until

from ddpdebug.config.settings import Config
from ddpdebug.disk import Disk
from ddpdebug.isolation import background
from ddpdebug.monitor import open_hangs, progress, seen_ranks
from ddpdebug.monitor.companion import Reply
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.monitor.progress import ProgressWatch
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.watcher import NoNotes
from ddpdebug.schema.announcements import Announcement, End, Hang, HangOver, Place
from ddpdebug.schema.finding import Finding, Severity
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

    def __init__(self, rank: int, clock: Clock, world: int = 2, home: Path | None = None, **options: Any) -> None:
        self.clock, self.seen = clock, works(rank)
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.announced: list[Announcement] = []
        self.fed: list[Announcement] = []
        self.told: list[Waiting] = []
        self.stands_in = 0
        self.notes, self.troubles = NoNotes(), list[str]()
        self.watch = ProgressWatch(
            rank,
            world,
            self,  # type: ignore[arg-type]  # has its one method
            disk=Disk(),
            folder=lambda: home,
            say=lambda kind, **fields: self.said.append((kind, fields)),
            announce=self.announced.append,
            feed=self.fed.append,
            stand_in=self._stand_in,
            tell=self.told.append,
            off=lambda part, text: self.troubles.append(f"{part}: {text}"),
            **options,
        )

    def _stand_in(self) -> None:
        self.stands_in += 1

    def look(self) -> RankProgress:
        """Look, as the watcher does."""
        return self.seen

    def address(self) -> int:
        """Return no address."""
        return 0

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
    for module in (progress, open_hangs, seen_ranks):
        monkeypatch.setattr(module, "time", made)
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
    monkeypatch.setattr(rank.watch._ranks, "from_outside", lambda _, **__: (seen, {0, 1}))
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


def _left(clock: Clock, members: tuple[int, ...]) -> tuple[Rank, Hang]:
    """Return rank 1 of three, which has said that rank 0 has ended, to those that are left."""
    rank = Rank(1, clock, world=3)
    rank.watch.hear_of(0, End(steps={}, reason="finished", entered={"0": 5}))
    for number in range(3):
        clock.now += 1
        rank.seen = waits(1, 1.0 + number)
        rank.watch.hear(2, "progress", {"look": to_json(waits(2, 1.0 + number))})
        rank.watch.tick(members)
    (hang,) = rank.announced
    assert isinstance(hang, Hang)
    assert (hang.kind, hang.ranks) == ("left", (0,))
    return rank, hang


@pytest.mark.parametrize(("members", "writes"), [((0, 1, 2), 0), ((1, 2), 1)])
def test_who_judges_writes_where_rank_0_has_gone(members: tuple[int, ...], writes: int, clock: Clock) -> None:
    """Until then rank 0 writes what all have heard, also while it is at its end itself."""
    rank, hang = _left(clock, members)
    assert rank.stands_in == 0
    rank.watch.hear_of(1, hang)
    assert (rank.stands_in, rank.fed) == (writes, [])
    rank.watch.close("finished")
    assert [each for each in rank.fed if isinstance(each, Hang)] == []


def test_what_nobody_has_heard_is_said_at_the_end(clock: Clock) -> None:
    """The ranks may lose each other between the word and its way."""
    rank, hang = _left(clock, (0, 1, 2))
    known = list[bool]()  # a word that is known to be judged here already is not taken again when it comes back
    rank.watch._hangs._feed = lambda each: (rank.fed.append(each), known.append(rank.watch.knows(hang)))
    rank.watch.close(_CLOSED)
    assert (rank.stands_in, rank.fed, known) == (1, [hang], [False])


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


def _stuck(ranks: tuple[int, ...] = (1,), kind: Any = "stuck") -> Hang:
    return Hang(kind=kind, ranks=ranks, step=5, waited=9.0, where={str(rank): "does not move" for rank in ranks})


def _hangs(rank: Rank) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.kind, each.ranks) for each in rank.announced if isinstance(each, Hang)]


def test_a_graver_hang_is_told_beside_one_that_is_open(clock: Clock) -> None:
    """The same one is not, nor one that says less; after one rank that has left another one is."""
    rank = Rank(0, clock, world=4)
    found = [("stuck", (1,)), ("stuck", (1,)), ("silent", (1,)), ("stuck", (2,)), ("left", (2,)), ("left", (2, 3))]
    for kind, ranks in found:
        rank.watch._conclude(_stuck(ranks, kind), clock.now, alone=False)
    assert _hangs(rank) == [("stuck", (1,)), ("silent", (1,)), ("left", (2,)), ("left", (3,))]


def test_a_verdict_that_comes_and_goes_is_one_hang(clock: Clock) -> None:
    """It is over once a rank that waited has gone on, also where all ranks are named, and is told again then."""
    rank = Rank(0, clock)
    rank.seen = waits(0, 9.0)
    rank.watch.tick((0, 1))
    found = _stuck((0, 1), "mismatch")
    for number in range(6):
        clock.now += 1
        rank.watch._conclude(found if number % 2 == 0 else None, clock.now, alone=False)
    assert [type(each) for each in rank.announced] == [Hang]
    clock.now += 1
    rank.seen = waits(0, 9.0, step=6)
    rank.watch.tick((0, 1))
    assert [type(each) for each in rank.announced] == [Hang, HangOver]
    rank.watch._conclude(found, clock.now, alone=False)
    assert [type(each) for each in rank.announced] == [Hang, HangOver, Hang]


def test_a_rank_that_waits_no_more_has_gone_on_after_some_seconds(clock: Clock) -> None:
    """One that only looks up from its collective has not."""
    rank = Rank(0, clock)
    rank.seen = waits(0, 9.0)
    rank.watch.tick((0, 1))
    rank.watch._conclude(_stuck(), clock.now, alone=False)
    for seen in (works(0), waits(0, 1.0), works(0), works(0), works(0)):
        rank.seen = replace(seen, entered={"0": 6})
        clock.now += 1
        rank.watch.tick((0, 1))
    assert _hangs(rank) == [("stuck", (1,))]
    assert len(rank.announced) == 1
    clock.now += 2
    rank.watch.tick((0, 1))
    assert isinstance(rank.announced[-1], HangOver)


def test_so_many_hangs_are_told_in_a_run(clock: Clock) -> None:
    """And once that there were more."""
    rank = Rank(0, clock)
    for step in range(2 * open_hangs._MOST_HANGS):
        clock.now += 1
        rank.seen = waits(0, 9.0, step=step)
        rank.watch.tick((0, 1))
        rank.watch._conclude(_stuck(), clock.now, alone=False)
    assert len(_hangs(rank)) == open_hangs._MOST_HANGS
    assert rank.troubles == [f"hangs: there were more than {open_hangs._MOST_HANGS}: others are not told"]


def test_a_new_judge_knows_the_hangs_of_the_one_before(clock: Clock) -> None:
    """It does not repeat them, and says that they are over where that one cannot."""
    rank = Rank(1, clock)
    rank.seen = waits(1, 9.0)
    rank.watch.tick((0, 1, 2))
    rank.watch.hear_of(0, replace(_stuck((2,)), judge=0, number=4))
    rank.watch._conclude(_stuck((2,)), clock.now, alone=False)
    assert rank.announced == []
    clock.now += 1
    rank.seen = works(1, step=6)
    rank.watch.tick((0, 1, 2))
    assert rank.announced == []  # rank 0 does
    rank.watch.tick((1, 2))
    clock.now += 1
    rank.watch.tick((1, 2))
    (over,) = rank.announced
    assert isinstance(over, HangOver)
    assert (over.judge, over.number) == (0, 4)


def test_what_was_judged_alone_the_others_hear_later(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a hang is over as well, and a second one of the same rank."""
    rank = Rank(1, clock)
    for step in (5, 7):
        rank.seen = waits(1, 6.0, step=step)
        seen = {0: progress.Seen(progress=works(0), silent=6.0, kernel="stopped"), 1: progress.Seen(progress=rank.seen)}
        monkeypatch.setattr(rank.watch._ranks, "from_outside", lambda _, seen=seen, **__: (seen, {0, 1}))
        clock.now += 1
        rank.watch.unanswered(6.0)
        clock.now += 1
        rank.seen = works(1, step=step + 1)
        monkeypatch.setattr(
            rank.watch._ranks, "from_outside", lambda _, **__: ({1: progress.Seen(progress=rank.seen)}, {1})
        )
        rank.watch.unanswered(6.0)
    assert [type(each) for each in rank.fed] == [Hang, HangOver, Hang, HangOver]
    rank.watch.tick((0, 1))
    assert rank.announced == rank.fed


def test_one_thread_judges_once_the_ranks_cannot_talk(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that is still waited for judges nothing then; nor does any thread while another one is inside."""
    rank = Rank(0, clock)
    looks: list[float] = []
    monkeypatch.setattr(rank.watch._ranks, "from_outside", lambda now, **__: looks.append(now) or ({}, {0}))
    rank.seen = waits(0, 6.0)
    with rank.watch._lock:
        rank.watch.unanswered(6.0)
        rank.watch.tick((0, 1))
        rank.watch.close("exception: RuntimeError: Connection closed by peer")
    assert looks == []
    rank.watch._lost = True
    rank.watch.unanswered(6.0)
    assert looks == []
    rank.watch._lost = False
    rank.watch.unanswered(6.0)
    assert len(looks) == 1


def test_a_look_is_as_old_as_it_was_when_it_was_made(clock: Clock) -> None:
    """Not as young as its arrival: a gather that was not answered brings old ones."""
    rank = Rank(0, clock)
    rank.watch.tick((0, 1))
    clock.now += 20
    rank.watch.hear(1, "progress", {"look": to_json(waits(1, 2.0))})
    assert rank.watch._ranks.looks[1][1] == clock.now - 20
    rank.watch.hear(
        1, "progress", {"look": to_json(replace(works(1), host=seen_ranks.kernel.host(), time=clock.now - 3))}
    )
    assert rank.watch._ranks.looks[1][1] == clock.now - 3


_BOX = """
import os, sys, time
from pathlib import Path
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
from ddpdebug.schema.progress import RankProgress
from ddpdebug.schema.wire import to_json
rank = int(sys.argv[1])
box = black_box.BlackBox(Path(sys.argv[2]), Disk())
box.mark(int(sys.argv[4]))
box.beat({**to_json(RankProgress(rank=rank, step=4, place="train.py:9")), "ended": sys.argv[3]})
print("ready", flush=True)
sys.stdin.read()
"""


def _box(home: Path, rank: int, ended: str = "", mark: int = 0, *, lives: bool = False) -> subprocess.Popen[str]:
    file = home / "ranks" / str(rank) / "black_box"
    file.parent.mkdir(parents=True)
    command = [sys.executable, "-c", _BOX, str(rank), str(file), ended, str(mark)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    if not lives:
        job.communicate()
    return job


_CLOSED = "exception: RuntimeError: [..gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4242"


def _at_home(rank: int, home: Path, world: int = 3) -> Rank:
    clock = Clock()
    clock.now = time.monotonic() - 100
    made = Rank(rank, clock, world=world, home=home)
    made.watch._ranks.began = 0.0
    return made


@pytest.mark.parametrize(
    ("ends", "accused"),
    [
        ({0: _CLOSED, 2: ""}, (2,)),  # a fellow victim, and one that has gone without a word
        ({0: "", 2: "exception: KeyError: 'x'"}, (2,)),
        ({0: _CLOSED, 2: "exception: KeyboardInterrupt: "}, None),
        ({0: _CLOSED, 2: _CLOSED}, None),
    ],
)
def test_who_has_ended_by_others_is_not_named(ends: dict[int, str], accused: Any, tmp_path: Path) -> None:
    """By what each rank has left in its black box; one that explains itself comes before one that does not."""
    for rank, ended in ends.items():
        _box(tmp_path, rank, ended)
    rank = _at_home(1, tmp_path)
    rank.watch._look()
    rank.watch.close(_CLOSED)
    assert [each.ranks for each in rank.fed if isinstance(each, Hang)] == ([] if accused is None else [accused])


def test_the_lowest_that_has_not_come_to_its_end_says_who_has_left(tmp_path: Path) -> None:
    """One that is there will, and may know more by then; of others it may be that they knew less."""
    job, _ = _box(tmp_path, 0, lives=True), _box(tmp_path, 1, "exception: KeyError: 'x'")
    rank = _at_home(2, tmp_path)
    rank.watch._look()
    rank.watch._judge_end(_CLOSED)
    assert rank.fed == []
    job.communicate()
    rank.watch._judge_end(_CLOSED)
    assert [each.ranks for each in rank.fed if isinstance(each, Hang)] == [(1,)]


_TIMED_OUT = "exception: RuntimeError: [../unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"


@pytest.mark.parametrize(("reason", "accused"), [(_CLOSED, [(0,)]), (_TIMED_OUT, [])])
def test_the_only_rank_of_which_nothing_is_known_has_gone(reason: str, accused: Any, tmp_path: Path) -> None:
    """It ran alone on its host: all others have lost their connection, which a rank that only waits does not close."""
    _box(tmp_path, 2, _CLOSED)
    rank = _at_home(1, tmp_path)
    rank.watch._look()
    rank.watch.close(reason)
    assert [each.ranks for each in rank.fed if isinstance(each, Hang)] == accused


def test_a_rank_that_goes_on_may_have_closed_the_connection(tmp_path: Path) -> None:
    """Nobody is named then."""
    job = _box(tmp_path, 2, lives=True)
    rank = _at_home(1, tmp_path)
    rank.watch._look()
    rank.watch.close(_CLOSED)
    assert rank.fed == []
    job.communicate()


def test_ranks_see_each_other_before_they_can_talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once they have met: each has its black box, and a thread looks at the others while they connect."""
    monkeypatch.setattr(progress, "_LOST_SECONDS", 0.01)
    (tmp_path / "ranks" / "1").mkdir(parents=True)
    rank, looked = _at_home(1, tmp_path), list[float]()
    rank.watch.begin()
    assert seen_ranks.black_box.read(tmp_path / "ranks" / "1" / "black_box") is not None
    rank.watch.unanswered = looked.append  # type: ignore[method-assign]
    with rank.watch.connecting():
        assert until(lambda: len(looked) > 1)
    assert until(lambda: "ddpdebug-connecting" not in background.names().values())


def test_a_rank_that_has_lost_its_launcher_names_nobody(tmp_path: Path) -> None:
    """The job is cancelled."""
    _box(tmp_path, 0)
    rank = _at_home(1, tmp_path, world=2)
    rank.watch._parent = -1
    rank.watch._look()
    rank.watch.close(_CLOSED)
    assert rank.fed == []


@pytest.mark.parametrize(("mark", "silent"), [(0, True), (progress._IN_A_SINK, False), (progress._IS_OFF, False)])
def test_a_thread_in_a_sink_is_no_silent_interpreter(mark: int, silent: bool, tmp_path: Path) -> None:
    """Nor is a rank whose watch is off."""
    job = _box(tmp_path, 0, mark=mark, lives=True)
    rank = _at_home(1, tmp_path, world=2)
    seen, here = rank.watch._ranks.from_outside(time.monotonic() + 10)
    assert here == {0, 1}
    assert (seen[0].silent > 0, seen[0].progress is not None) == (silent, silent)
    job.communicate()


def test_the_mark_is_set_around_writes_of_the_thread(clock: Clock, tmp_path: Path) -> None:
    """And stays once the part is off."""
    rank = Rank(0, clock, home=tmp_path)
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    rank.watch._look()
    file = tmp_path / "ranks" / "0" / "black_box"

    def mark() -> int:
        box = seen_ranks.black_box.read(file)
        assert box is not None
        return box.mark

    with rank.watch.writing():
        assert mark() == progress._IN_A_SINK
    assert mark() == 0
    rank.watch.went_off()
    with rank.watch.writing():
        assert mark() == progress._IS_OFF
    assert mark() == progress._IS_OFF


def test_files_of_other_hosts_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other nodes never; and behind a lower rank that answers none at all."""
    rank = _at_home(2, tmp_path, world=6)
    read: list[int] = []
    look = to_json(works(0))

    def fake(file: Path, *, notes: bool = True) -> Any:
        number = int(file.parent.name)
        read.append(number)
        known: dict[str, Any] = {"pid": os.getpid(), "started": 0, "beat": now, "look": look, "notes": ()}
        return seen_ranks.black_box.Recorded(here=number < 4, **known)

    now = time.monotonic()
    monkeypatch.setattr(seen_ranks.black_box, "read", fake)
    monkeypatch.setattr(seen_ranks.black_box.Recorded, "kernel", lambda _: seen_ranks.kernel.Kernel(state="S"))
    for other, node in ((0, "a"), (2, "a"), (3, "a"), (4, "a"), (5, "b")):
        rank.watch.hear_of(other, Place(node=node, local_rank=0))
    rank.watch._ranks.from_outside(now)
    assert read == [0, 1, 3, 4]
    rank.watch._ranks.from_outside(now)
    assert read[4:] == [0, 1, 3]
    _, here = rank.watch._ranks.from_outside(now, whole=False)
    assert (read[7:], here) == ([0], {0, 1, 2, 3})


def test_a_hang_ends_no_job_by_on_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--on-hang` does; other findings still do."""
    monitor = Monitor(Config(on_finding="raise"))
    said: list[str] = []
    monkeypatch.setattr(monitor, "_say", lambda kind, **_: said.append(kind))
    for code in ("HANG501", "RANK101"):
        finding = Finding(code=code, severity=Severity.CRITICAL, title="t", id=f"{code}-1")
        monitor._report([(finding, True)], 0)
        assert said == ([] if code == "HANG501" else ["stop"])


def test_a_hang_that_one_rank_hears_judges_nothing_else() -> None:
    """Its id is that of its judge, alike on all ranks; what other rules wait for is as old as it was."""
    monitor = Monitor(Config())
    ticks: list[int] = []
    monitor._judging._companion.tick = lambda: ticks.append(1) or Reply()  # type: ignore[method-assign]
    monitor._hear_own(replace(_stuck(), judge=3, number=2))
    assert [finding.id for finding in monitor.findings] == ["HANG501-3.2"]
    assert ticks == []


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
