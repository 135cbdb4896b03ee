"""The watch over hangs where ranks are very many: what it costs each of them, and that it is seen all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdebug.disk import Disk
from ddpdebug.monitor import open_hangs, progress, seen_ranks
from ddpdebug.monitor.progress import ProgressWatch
from ddpdebug.progress import waits as judging
from ddpdebug.progress.waits import Seen, judge
from ddpdebug.progress.watcher import NoNotes
from ddpdebug.schema.announcements import Announcement, Hang
from ddpdebug.schema.progress import Call, RankProgress

_WORLD = 1024


class Clock:
    """The time, set by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        """Return it."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still until it is moved."""
    made = Clock()
    for module in (progress, seen_ranks, open_hangs):
        monkeypatch.setattr(module, "time", made)
    return made


class Rank:
    """A rank whose looks are given, and what it has told."""

    def __init__(self, rank: int, world: int, home: Path | None = None) -> None:
        self.seen, self.notes = RankProgress(rank=rank), NoNotes()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.announced: list[Announcement] = []
        self.watch = ProgressWatch(
            rank,
            world,
            self,  # type: ignore[arg-type]  # has what is used
            disk=Disk(),
            folder=lambda: home,
            say=lambda kind, **fields: self.said.append((kind, fields)),
            announce=self.announced.append,
            feed=lambda _: None,
            stand_in=lambda: None,
            tell=lambda _: None,
            off=lambda *_: None,
        )

    def look(self) -> RankProgress:
        """Look, as the watcher does."""
        return self.seen

    def address(self) -> int:
        """Return no address."""
        return 0


def _works(rank: int, still: float) -> RankProgress:
    return RankProgress(rank=rank, step=5, same=still, still=still, entered={"0": 5}, place="train.py:88")


def _waits(seconds: float, rank: int, ranks: tuple[int, ...]) -> RankProgress:
    call = Call(group="0", number=6, operation="all_reduce", ranks=ranks)
    how: dict[str, Any] = {"same": seconds, "still": seconds, "waits": (call,), "recent": (call,) * 16}
    return RankProgress(rank=rank, step=5, entered={"0": 6}, **how)


@pytest.mark.parametrize(("world", "most"), [(2, 26), (64, 26), (65, 26), (_WORLD, 7), (8192, 2)])
def test_the_more_ranks_the_less_often_each_tells(world: int, most: int, clock: Clock) -> None:
    """In ten seconds of waiting; who waits says so to all in the same words, and how is for the one that judges."""
    rank = Rank(5, world)
    for _ in range(100):
        clock.now += 0.1
        rank.seen = _waits(5.0, 5, (0, 5))
        rank.watch.tick(tuple(range(world)))
    looks = [fields["look"] for kind, fields in rank.said if kind == "progress"]
    assert most / 2 <= len(looks) <= most
    words = [fields for kind, fields in rank.said if kind == "waits"]
    assert words == [{}] * (len(looks) if world > 64 else 0)
    assert len(looks[0]["recent"]) == (8 if world > 64 else 16)


@pytest.mark.slow
def test_the_judge_hears_of_a_rank_that_does_not_come(clock: Clock) -> None:
    """The one that all wait for tells how it is because it hears that others wait, and none of them hears the looks."""
    first, missing, other = (Rank(rank, _WORLD) for rank in (0, 7, 9))
    everyone = tuple(range(_WORLD))
    for number in range(30):
        clock.now += 1.0
        first.seen, other.seen = _waits(number, 0, everyone), _waits(number, 9, everyone)
        missing.seen = _works(7, float(number))
        for rank in (first, missing, other):
            rank.watch.tick(everyone)
        for rank in range(_WORLD):  # all others are as the ninth
            if rank not in {0, 7}:
                first.watch.hear(rank, "progress", {"look": seen_ranks.short(_waits(number, rank, everyone))})
        if any(kind == "waits" for kind, _ in other.said):
            for each in (first, missing):
                each.watch.hear(9, "waits", {})
        for kind, fields in missing.said:
            if kind == "progress":
                first.watch.hear(7, kind, fields)
        missing.said.clear()
        other.said.clear()
    hangs = [one for one in first.announced if isinstance(one, Hang)]
    assert [(one.kind, one.ranks) for one in hangs] == [("stuck", (7,))]
    assert missing.announced == other.announced == []


def test_what_many_wait_in_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each pair of them: of a thousand that is a million."""
    looked, is_in = list[None](), judging._is_in

    def counting(*given: Any, **options: Any) -> bool:
        looked.append(None)
        return is_in(*given, **options)

    monkeypatch.setattr(judging, "_is_in", counting)
    everyone = tuple(range(_WORLD))
    seen = {rank: Seen(progress=_waits(30.0, rank, everyone)) for rank in everyone}
    seen[7] = Seen(progress=_works(7, 30.0))
    found = judge(seen)
    assert found is not None
    assert (found.kind, found.ranks) == ("stuck", (7,))
    assert len(looked) <= 2 * _WORLD


def test_black_boxes_of_far_ranks_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks that lie on one file system would read a million files together."""
    read: list[int] = []
    monkeypatch.setattr(seen_ranks.black_box, "read", lambda path, **_: read.append(int(path.parent.name)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    Rank(500, _WORLD, tmp_path).watch.unanswered(3.0)
    near = [rank for rank in range(436, 565) if rank != 500]
    assert sorted(read) == near
    read.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of 128 hosts: these may be of this one as well
    Rank(500, _WORLD, tmp_path).watch.unanswered(3.0)
    assert sorted(read) == sorted([*near, 116, 244, 372, 628, 756, 884, 1012])
    read.clear()
    Rank(0, 64, tmp_path).watch.unanswered(3.0)
    assert sorted(read) == list(range(1, 64))


def test_who_was_looked_for_too_early_is_not_silent(clock: Clock) -> None:
    """Of very many ranks each one's sign in the store is looked for every half minute only."""

    class Signs:
        is_over = False
        heard, missed = dict, staticmethod(lambda: {500: clock.now - 18.0, 600: clock.now - 2.0})
        unanswered, keep = staticmethod(lambda: 0.0), staticmethod(lambda *_: None)

    ranks = Rank(0, 8192).watch._ranks
    ranks._beats = Signs()  # type: ignore[assignment]  # has what is used
    ranks.looks[0] = RankProgress(rank=0), clock.now
    seen = {rank: Seen() for rank in range(8192)}
    ranks.hear_beats(seen, {0}, list(range(8, 8192)), 20.0, clock.now, speaks=True)
    assert [rank for rank, one in seen.items() if one.silent] == [600]
