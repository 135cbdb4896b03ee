"""A supervised command leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from machine import PATIENCE, until

from ddpdebug.processes import supervisor
from ddpdebug.processes.supervisor import supervise

_TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {process.pid}")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)


def _environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TEST_MARK": str(tmp_path)}


def _ended(file: Path) -> bool:
    """Return whether both processes of a tree have ended; one that was killed needs its turn for that."""
    pids = [int(word) for word in file.read_text(encoding="utf-8").split()]
    return len(pids) == 2 and until(lambda: not any(map(_alive, pids)))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("source, status", [("pass", 0), ("raise SystemExit(5)", 5), ("import os; os.abort()", -6)])
def test_status(source: str, status: int, tmp_path: Path) -> None:
    """The exit status of the command comes back."""
    assert supervise([sys.executable, "-c", source], _environ(tmp_path), PATIENCE, "TEST_MARK") == status


def test_timeout_ends_the_tree(tmp_path: Path) -> None:
    """Processes that ignore SIGTERM and have sessions of their own are ended too."""
    file = tmp_path / "pids"
    words = [sys.executable, "-c", _TREE, str(file)]
    late = partial(until, lambda: file.exists() and file.read_text(encoding="utf-8").count(" "))
    assert supervise(words, _environ(tmp_path), 1, "TEST_MARK", late=late) is None
    assert _ended(file)


def test_a_run_that_comes_to_nothing_is_ended(tmp_path: Path) -> None:
    """Long before its time is over, and its stacks are asked for before."""
    file, asked = tmp_path / "pids", list[bool]()
    words = [sys.executable, "-c", _TREE, str(file)]
    over = partial(until, lambda: file.exists() and file.read_text(encoding="utf-8").count(" "))
    late = lambda: asked.append(not _ended_now(file))  # noqa: E731
    status = supervise(words, _environ(tmp_path), PATIENCE, "TEST_MARK", late=late, over=lambda: bool(over()))
    assert (status, asked) == (None, [True])
    assert _ended(file)


def _ended_now(file: Path) -> bool:
    return not any(_alive(int(word)) for word in file.read_text(encoding="utf-8").split())


def test_stopped_process_is_ended(tmp_path: Path) -> None:
    """A process under SIGSTOP cannot answer SIGTERM; it is killed."""
    source = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert supervise([sys.executable, "-c", source], _environ(tmp_path), 1, "TEST_MARK") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_tree_first(number: signal.Signals, tmp_path: Path) -> None:
    """When the supervising process is told to end, its run ends before it, and it dies by that signal."""
    file = tmp_path / "pids"
    code = f"""
import os, sys
from ddpdebug.processes import supervisor
supervisor.GRACE_SECONDS = 0.5
supervisor.supervise([sys.executable, "-c", {_TREE!r}, {str(file)!r}], os.environ, 600, "TEST_MARK")
"""
    with subprocess.Popen([sys.executable, "-c", code], env=_environ(tmp_path), stderr=subprocess.DEVNULL) as process:
        assert until(lambda: file.exists() and file.read_text(encoding="utf-8").count(" "))
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number
    assert _ended(file)
