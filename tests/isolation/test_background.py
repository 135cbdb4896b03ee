"""Threads of ours, of which `threading` knows nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from ddpdebug.isolation import background
from ddpdebug.isolation.background import Thread, Timer

#: What does not run in a job, or as a process of its own beside it.
_ELSEWHERE = ("hub", "preflight", "pytest_plugin", "reports", "testing")
_PACKAGE = Path(background.__file__).parent.parent


def test_no_other_thread_is_started_in_a_job() -> None:
    """Nor is anything used that asks `threading` who runs here."""
    known = re.compile(r"threading\.(Thread|Timer)\(|start_new_thread|ThreadPoolExecutor|^import logging", re.MULTILINE)
    files = (file for file in _PACKAGE.rglob("*.py") if file.relative_to(_PACKAGE).parts[0] not in _ELSEWHERE)
    found = {file.relative_to(_PACKAGE).as_posix() for file in files if known.search(file.read_text("utf-8"))}
    assert found == {"isolation/background.py"}


def test_signals_are_not_delivered_to_it() -> None:
    """But for those that its own doing causes, which faulthandler shows."""
    masks: list[set[int | signal.Signals]] = []
    Thread("ours", lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))).join()
    assert masks[0] >= {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE, signal.SIGCHLD}
    assert signal.SIGSEGV not in masks[0]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_threading_does_not_know_it() -> None:
    """It is not listed, counted, traced or profiled, and has a name for people."""
    seen, traced = list[int](), list[int]()  # threads that other tests have left behind come and go meanwhile
    go, stop = threading.Event(), threading.Event()

    def run() -> None:
        seen.append(threading.get_ident())
        go.set()
        stop.wait()

    def trace(_: FrameType, *__: object) -> None:
        traced.append(threading.get_ident())

    threading.settrace(trace)
    threading.setprofile(trace)
    try:
        thread = Thread("ours", run)
        go.wait()
        assert seen[0] not in {one.ident for one in threading.enumerate()}
        assert background.names()[seen[0]] == "ours"
        assert seen[0] in sys._current_frames()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        threading.setprofile(None)
    thread.join(0.01)
    assert thread.is_alive()
    assert not thread.is_here()
    stop.set()
    thread.join()
    assert not thread.is_alive()
    assert seen[0] not in background.names()
    assert seen[0] not in traced


def test_what_it_raises_reaches_no_hook(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither those of the script nor the terminal."""
    heard: list[object] = []
    for module, name in ((threading, "excepthook"), (sys, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(module, name, heard.append)

    def fail() -> None:
        raise SystemExit("not of the job")

    Thread("ours", fail).join()
    assert heard == []
    assert capfd.readouterr() == ("", "")


def test_a_timer_calls_unless_it_is_cancelled() -> None:
    """Once its time is over; to cancel twice does nothing more."""
    called = list[str]()
    Timer("ours", 0.0, called.append, "now").join()
    later = Timer("ours", 1000.0, called.append, "later")
    later.cancel()
    later.join()
    later.cancel()
    assert called == ["now"]


def test_a_forked_child_has_none() -> None:
    """Nobody there waits for a thread that was not copied."""
    stop = threading.Event()
    thread = Thread("ours", stop.wait)
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(int(thread.is_alive() or background.names() != {}))
    stop.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
