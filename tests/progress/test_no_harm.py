"""Ranks that nobody may be accused of: they have ended, or work in another thread than the one that trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Result
from machine import until

from ddpdebug.disk import Disk
from ddpdebug.monitor import progress
from ddpdebug.progress.watcher import NoNotes
from ddpdebug.schema.progress import RankProgress


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [Job(kind=kind, seconds=seconds, whole=True) for kind, seconds in (("pool_writes", 15), ("os_exit_all", 5))]
)
def test_nobody_is_named(job: Job, result: Result) -> None:
    """A pool that works while the training thread joins it; ranks that end by `os._exit(0)`, seconds apart."""
    assert (result.findings, result.statuses) == ([], [0, 0])


class _Counting:
    """Stands for the look at a process."""

    notes = NoNotes()

    def __init__(self) -> None:
        self.looks = 0

    def entered(self) -> dict[str, int]:
        return {}

    def look(self) -> RankProgress:
        self.looks += 1
        return RankProgress(rank=0)

    def address(self) -> int:
        return 0


def _watch(watcher: Any, folder: Path) -> progress.ProgressWatch:
    def nothing(*_: object, **__: object) -> None: ...

    calls: dict[str, Any] = dict.fromkeys(("say", "announce", "feed", "stand_in", "tell", "off"), nothing)
    (folder / "ranks" / "0").mkdir(parents=True)
    return progress.ProgressWatch(0, 2, watcher, disk=Disk(), folder=lambda: folder, **calls)


def test_looks_are_bounded(tmp_path: Path) -> None:
    """However often the ranks talk: what a look costs does not grow with the steps of a second."""
    watcher = _Counting()
    watch = _watch(watcher, tmp_path)
    for _ in range(1000):
        watch.tick((0, 1))
    first = watcher.looks
    assert until(lambda: watch.tick((0, 1)) or watcher.looks > first)
    assert first < 1000
    watch.close("finished")


def test_who_is_left_looks_for_some_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that goes on once the ranks can no longer talk ends by itself, and at once where the job does."""
    for limit in (0.1, 600.0):
        monkeypatch.setattr(progress, "_LOST_LIMIT_SECONDS", limit)
        watch = _watch(_Counting(), tmp_path / str(limit))
        watch.lost()
        if limit > 1.0:
            watch.close("finished")
        assert until(lambda: all(thread.name != "ddpdebug-progress" for thread in threading.enumerate()))
        watch.close("finished")


def test_the_run_directory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks share it: nobody looks there at each look; and a disk that takes no answer does not end the watch."""
    watcher = _Counting()
    watch, asked, told = _watch(watcher, tmp_path), list[Path](), list[str]()
    watch._off = lambda part, message: told.append(part)

    def look(home: Path, own: RankProgress) -> None:
        asked.append(home)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch._asked, "look", look)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.0)
    for _ in range(100):
        watch.tick((0, 1))
    assert watcher.looks >= 100
    assert (asked, told) == ([tmp_path], ["stacks"])
    watch.close("finished")
