"""Ranks that a script starts: what is carried into their processes, and what these see of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdebug.config.settings import Config
from ddpdebug.errors import StopRun
from ddpdebug.monitor import spawned
from ddpdebug.monitor.spawned import Arrival, Origin, Running, Starts, note


class _Process:
    """A process object that has been started with `Running` in it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        vars(self)["run"] = Running(b"")

    def run(self) -> None:
        self._run()


class _Object(SimpleNamespace):
    """Stands for a process object: can be referred to weakly."""

    __hash__ = object.__hash__


class _Monitor:
    def __init__(self) -> None:
        self.ends: list[tuple[Any, ...]] = []

    def close(self, *end: Any) -> None:
        self.ends.append(end)


def _of_torch(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        try:
            raise error
        except (ValueError, KeyError):
            sys.exit(1)

    return run


def _raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    "run, raised, end",
    [
        (lambda: None, None, ("finished", 0)),
        (_raising(StopRun(3)), None, ("stopped", 0)),
        (_raising(ValueError("x")), ValueError, ("exception: ValueError: x", 1)),
        (_raising(SystemExit(0)), SystemExit, ("finished", 0)),
        (_raising(SystemExit(7)), SystemExit, ("exception: SystemExit: 7", 7)),
        (_raising(SystemExit("text")), SystemExit, ("exception: SystemExit: text", 1)),
        (_raising(KeyboardInterrupt()), KeyboardInterrupt, ("interrupted", 130)),
        (_of_torch(KeyError("y")), SystemExit, ("exception: KeyError: 'y'", 1)),
    ],
)
def test_a_rank_ends_as_it_would_without_us(
    run: Callable[[], None],
    raised: type[BaseException] | None,
    end: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same exception, with no frame of ours in its traceback; the run's record has the cause."""
    monitor, process = _Monitor(), _Process(run)
    monkeypatch.setattr("multiprocessing.process.current_process", lambda: process)
    monkeypatch.setattr(Arrival, "await_group", lambda self: setattr(self, "_monitor", monitor))
    running = pickle.loads(pickle.dumps(vars(process)["run"]))
    seen: BaseException | None = None
    try:
        running()
    except BaseException as error:  # noqa: BLE001 - what the process would end with
        seen = error
    assert type(seen) is (type(None) if raised is None else raised)
    if seen is not None:
        files = [frame.filename for frame in traceback.extract_tb(seen.__traceback__)]
        assert str(Path(spawned.__file__)) not in files
    assert [found[:2] for found in monitor.ends] == [end]
    assert "run" not in vars(process)


def _starts(folder: Path, *, is_rank: bool = False) -> Starts:
    def origin(notes: Path) -> Origin:
        known: dict[str, Any] = {"command": (), "run_id": "r", "number": 0, "as_check": False, "attach": len}
        return Origin(config=Config(out=folder), notes=notes, **known)

    return Starts(origin, lambda: is_rank)


def test_a_process_object_is_left_as_it_was(tmp_path: Path) -> None:
    """Only while it starts does it hold something of ours, and never in the place of something of the user's."""
    starts, process, own = _starts(tmp_path), _Object(pid=5), _Object(run=print)
    starts.before(process)
    assert isinstance(process.run, Running)
    starts.after(process)
    starts.before(own)
    starts.after(own)
    assert vars(process) == {"pid": 5}
    assert own.run is print
    starts.close()


def test_no_process_gets_what_it_could_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another interpreter, a path on which there is no ddpdebug, and a process of one rank of several."""
    process = _Object(pid=5)
    _starts(tmp_path, is_rank=True).before(process)
    with monkeypatch.context() as patched:
        patched.setattr("multiprocessing.spawn.get_executable", lambda: b"/usr/bin/other")
        _starts(tmp_path).before(process)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [])
        _starts(tmp_path).before(process)
    assert vars(process) == {"pid": 5}


def test_where_temporary_files_go_is_still_for_the_script_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tempfile` asks the environment once, and a forked process would inherit the answer."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given: list[Path] = []

    def make(notes: Path) -> Any:
        given.append(notes)
        return "made"

    starts = Starts(make, lambda: False)
    starts.before(_Object(pid=1))
    assert given[0].parent != tmp_path  # which is the script's
    assert tempfile.tempdir is None
    given[0].rmdir()


def test_ranks_are_known_by_their_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has joined no group is none; one whose object is gone still is."""
    starts = _starts(tmp_path)
    one, two = (_Object(pid=pid, sentinel=-1, exitcode=pid) for pid in (-9, 4))
    for process in (one, two):
        starts.before(process)
        starts.after(process)
    assert not starts.any_ranks
    monkeypatch.setattr("os.getpid", lambda: -9)
    assert starts._origin is not None
    note(starts._origin, 1)
    monkeypatch.undo()
    assert starts.any_ranks
    assert starts.ranks() == {1: one}
    assert starts.account() == (tmp_path, {1: -9})
    notes = starts._origin.notes
    starts.close()
    assert not notes.exists()
    assert starts.any_ranks


_LIGHT = """
import multiprocessing, sys
from ddpdebug.monitor.spawned import Running
def target():
    ours = [name for name in sys.modules if name.startswith("ddpdebug.monitor.m")]
    sys.exit(10 * ("torch" in sys.modules) + len(ours))
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=target)
    process.run = Running(b"never read")
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_a_helper_loads_nothing(tmp_path: Path) -> None:
    """A process that never loads torch does not load it for us."""
    (tmp_path / "light.py").write_text(_LIGHT)
    done = subprocess.run([sys.executable, "light.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
