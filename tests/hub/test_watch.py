"""Watching directories: what comes there, what grows, what is left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import until

from ddpdebug.hub.store import Store
from ddpdebug.hub.watch import Watch, runs_below
from ddpdebug.run_directory.mirror import Mirror
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import RunEnded, RunStarted, StepJudged
from tests.hub.runs import MadeUp
from tests.hub.test_store import Clock, held, mirrored, same, wait


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "hub.sqlite")
    yield found
    found.close()


def watch(store: Store, root: Path, **more: float) -> tuple[Watch, list[str]]:
    """Return a watch that looks when it is told to, and what it says."""
    said: list[str] = []
    found = Watch(store, [root], failed=said.append, **more)
    return found, said


def look(found: Watch) -> None:
    """Look at everything, new runs too."""
    found._next_search = 0.0
    found._over.clear()
    found.look()


def test_run_that_grows(tmp_path: Path, store: Store) -> None:
    """A run that is written while it is watched is in the store as it is in its directory, at each look."""
    directory = tmp_path / "runs" / "a"
    sink = RunDirectory(directory, 0)
    sink.write(
        RunStarted(
            run_id="aaaaaa", rank=0, world=1, directory=directory, config={}, versions={}, time="2026-11-21T08:00:00Z"
        )
    )
    found, said = watch(store, tmp_path / "runs")
    for step in range(5):
        sink.write(StepJudged(step=Step(step=step, optimizer=0, world=1, rows={0: Row(rank=0, step=step, loss=2.0)})))
        look(found)
        same(store, MadeUp(world=1), directory)
        assert store.runs()[0]["state"] == "running"
    sink.write(RunEnded(reason="finished", exit_code=0, steps={0: 5}))
    sink.close()

    def done() -> bool:
        look(found)
        return held(store, MadeUp().key) == mirrored(directory) and not found._mirrors

    assert until(done)  # the folders of ranks are not looked into each time; then nothing is held open
    same(store, MadeUp(world=1), directory)
    assert store.runs()[0]["state"] == "finished"
    assert said == []


def test_where_runs_are(tmp_path: Path) -> None:
    """Runs are found below a directory, those that were in a directory before too; links lead nowhere."""
    root = tmp_path / "runs"
    for place in ("a", "team/b", "team/b/previous-1", "team/b/bundles/c", "deep/1/2/3/4/5/6/7", ".hidden"):
        (root / place).mkdir(parents=True)
        (root / place / "run.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text("{}")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "file").mkdir()
    (root / "file" / "run.json").symlink_to(tmp_path / "elsewhere" / "run.json")
    found = {str(path.relative_to(root)) for path in runs_below(root)}
    assert found == {"a", "team/b", "team/b/previous-1"}


def test_old_runs_are_left_alone(tmp_path: Path, store: Store) -> None:
    """What was written longer ago than the hub keeps runs is not taken in, to be deleted at once."""
    old = MadeUp(run="old").write(tmp_path / "runs" / "old")
    os.utime(old / "run.json", (1e9, 1e9))
    MadeUp(run="new").write(tmp_path / "runs" / "new")
    found, _ = watch(store, tmp_path / "runs", keep=86400.0)
    look(found)
    assert [run["run_id"] for run in store.runs()] == ["new"]


def test_deleted_runs_stay_deleted(tmp_path: Path, store: Store) -> None:
    """A run that was deleted from the hub is not taken in again from its directory; that is said once."""
    run = MadeUp()
    run.write(tmp_path / "runs" / "a")
    found, said = watch(store, tmp_path / "runs")
    look(found)
    look(found)
    store.delete(run.key)
    look(found)
    look(found)
    assert store.runs() == []
    assert len(said) == 1
    assert "was deleted" in said[0]


def test_times_are_those_of_the_files(tmp_path: Path) -> None:
    """A run that stopped being written long ago is lost when it is found, not half a minute later."""
    clock = Clock()
    store = Store(tmp_path / "hub.sqlite", clock)
    directory = MadeUp(ended=None).write(tmp_path / "runs" / "a")
    for path in directory.rglob("*"):
        os.utime(path, (clock.now - 5000, clock.now - 5000))
    found, _ = watch(store, tmp_path / "runs")
    look(found)
    assert store.runs()[0]["last_seen"] == clock.now - 5000
    wait(store, clock, 181)
    assert store.runs()[0]["state"] == "running"  # nobody has looked since
    look(found)
    wait(store, clock, 1)
    assert store.runs()[0]["state"] == "lost"


def test_unreadable(tmp_path: Path, store: Store) -> None:
    """A directory that is no run says so once, and the others are shown."""
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "run.json").write_text("[]")
    MadeUp().write(tmp_path / "runs" / "good")
    found, said = watch(store, tmp_path / "runs")
    look(found)
    look(found)
    assert len(store.runs()) == 1
    assert len(said) == 1
    assert "no readable run.json" in said[0]


def test_whatever_a_directory_holds(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody has thought of is that of one directory, is said once, and the others are watched."""
    bad, _ = (MadeUp(run=name).write(tmp_path / "runs" / name) for name in ("bad", "good"))
    receive = store.receive

    def fail(key: str, *words: object, **more: object) -> object:
        if key.endswith("-bad"):
            raise TypeError("nobody has thought of this")
        return receive(key, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "receive", fail)
    found, said = watch(store, tmp_path / "runs")
    look(found)
    look(found)
    assert [run["run_id"] for run in store.runs()] == ["good"]
    assert said == [f"cannot show {bad}: TypeError: nobody has thought of this"]


def test_the_watch_goes_on(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails as a whole is not the last one."""
    looks: list[int] = []

    def fail() -> None:
        looks.append(1)
        raise RecursionError

    found, said = watch(store, tmp_path)
    monkeypatch.setattr(found, "look", fail)
    monkeypatch.setattr("ddpdebug.hub.watch._EVERY", 0.01)
    found.start()
    assert until(lambda: len(looks) > 1)
    found.close()
    assert said == ["cannot look for runs: RecursionError: "]


@pytest.mark.parametrize("kind", ["deleted", "unreadable"])
def test_set_aside(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What is not shown is not opened at each look, until its run.json is another one."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "runs" / "a")
    if kind == "deleted":
        store.delete(run.key)
    else:
        (directory / "run.json").write_text("[]")
    found, _ = watch(store, tmp_path / "runs")
    look(found)
    opened: list[Path] = []
    monkeypatch.setattr("ddpdebug.hub.watch.Mirror", lambda path: opened.append(path) or Mirror(path))
    found.look()
    assert opened == []
    MadeUp(run="bbbbbb", ended=None).write(directory)
    found.look()
    assert opened == [directory]
    assert [run["run_id"] for run in store.runs()] == ["bbbbbb"]
    found.close()


def test_old_directories_are_not_held_open(tmp_path: Path, store: Store) -> None:
    """A first look at many runs that are over does not hold them all."""
    directory = MadeUp().write(tmp_path / "runs" / "old")
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (store.clock() - 5000,) * 2)
    found, _ = watch(store, tmp_path / "runs")
    look(found)
    assert found._mirrors == {}
    same(store, MadeUp(), directory)
