"""What the kernel shows: its files as literals, with states that nobody can bring about at will, and real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from machine import until

from ddpdebug.disk import Disk
from ddpdebug.progress import black_box, kernel
from ddpdebug.progress.kernel import Family, Kernel

#: Of a process whose name holds a space and brackets, in uninterruptible I/O: 1.5 s of processor time, 0.25 s of its
#: children's that have ended.
_STAT = (
    "4711 (a) b (c) D 1 4711 4711 0 -1 4194304 900 0 12 0 100 50 20 5 20 0 3 0 987654 1000 200 18446744073709551615 "
    "1 1 0 0 0 0 0 4096 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 9"
)
_IO = "rchar: 1000\nwchar: 500\nsyscr: 3\nsyscw: 2\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
_STATUS = "Name:\ta\nState:\tD (disk sleep)\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put literals in the place of `/proc`."""
    for folder in (tmp_path / "4711", tmp_path / "self/task/4712", tmp_path / "4711/task/4711"):
        folder.mkdir(parents=True)
        for name, text in {
            "stat": _STAT, "io": _IO, "status": _STATUS, "wchan": "rq_qos_wait", "schedstat": "1 2500000000 3\n",
        }.items():  # fmt: skip
            (folder / name).write_text(text)
    monkeypatch.setattr(kernel, "_PROC", tmp_path)
    monkeypatch.setattr(kernel, "_TICKS", 100)
    return tmp_path


def test_a_process_in_uninterruptible_io(proc: Path) -> None:
    """Its state, what it waits in, and what it has used, whatever its name is."""
    known = kernel.process(4711)
    assert known == Kernel(
        state="D", wchan="rq_qos_wait", cpu=1.5, queued=2.5, disk=12288, data=1500, started=987654, ended_by=None
    )
    assert known.words() == "in uninterruptible I/O in rq_qos_wait"
    assert (known.is_gone, known.is_stopped) == (False, False)


def test_a_thread(proc: Path) -> None:
    """Its own numbers, with how often it went to sleep."""
    known = kernel.thread(4712)
    assert known is not None
    assert (known.state, known.wakes, known.queued) == ("D", 42, 2.5)


def test_a_family(proc: Path) -> None:
    """With what its members that have ended had used, and no wakes from a sleep, which time has ended."""
    assert kernel.family([4711]) == Family(cpu=1.75, queued=2.5, data=1500, wakes=42, blocked=frozenset({(4711, 42)}))
    (proc / "4711/task/4711/wchan").write_text("hrtimer_nanosleep")
    assert kernel.family([4711]).wakes == 0
    assert kernel.family([99]) == kernel.family([]) == Family()


@pytest.mark.parametrize("name", ["stat", "io", "status", "wchan", "schedstat"])
@pytest.mark.parametrize("text", ["", "x", "4711 (a) R", "\xff\n\0", "a: b\n" * 50])
def test_files_that_read_otherwise(proc: Path, name: str, text: str) -> None:
    """A kernel that shows less, or nothing, ends nothing."""
    for folder in ("4711", "self/task/4712"):
        (proc / folder / name).write_text(text, encoding="utf-8")
    for known in (kernel.process(4711), kernel.thread(4712)):
        assert known is None if name == "stat" else known is not None and known.state == "D"
    kernel.family([4711])


def test_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere than on Linux nothing is known."""
    monkeypatch.setattr(kernel, "_PROC", tmp_path / "none")
    assert kernel.process(os.getpid()) is None
    assert kernel.thread(1) is None
    assert (kernel.children(), kernel.started(1), kernel.family([1])) == ([], 0, Family())


@pytest.mark.parametrize(
    "state, words",
    [
        ("R", "runs"),
        ("S", "asleep in do_wait"),
        ("T", "stopped by a signal in do_wait"),
        ("t", "stopped by a debugger"),
        ("D", "in uninterruptible I/O in do_wait"),
        ("Z", "dead, and not yet collected"),
        ("I", "asleep"),
    ],
)
def test_states_in_words(state: str, words: str) -> None:
    """With what it waits in, where that says something."""
    assert Kernel(state=state, wchan="do_wait").words() == words
    assert Kernel(state=state, wchan="0").words() == words.removesuffix(" in do_wait")


@pytest.mark.parametrize(
    "status, words",
    [
        (0, "it has ended with exit status 0"),
        (3 << 8, "it has ended with exit status 3"),
        (signal.SIGKILL, "it was killed by SIGKILL"),
        (signal.SIGSEGV | 0x80, "it was killed by SIGSEGV"),
        (99, "it was killed by signal 99"),
    ],
)
def test_endings_in_words(status: int, words: str) -> None:
    """As `wait` has them; 0x80 tells of a core file."""
    assert kernel.ending(status) == words


@pytest.mark.parametrize(
    "after, moved",
    [
        ({}, False),
        ({"cpu": 0.04}, False),
        ({"cpu": 0.2}, True),
        ({"queued": 0.2}, True),  # it wanted to run, and another process did
        ({"disk": 1}, True),
        ({"data": 4000}, False),  # a file of some numbers, read again and again
        ({"data": 20_000}, True),
        ({"wakes": 1000}, False),
    ],
)
def test_what_counts_as_movement(after: dict[str, float], moved: bool) -> None:
    """Over one second."""
    assert Kernel(state="S", **after).moved_since(Kernel(state="S"), 1.0) is moved


@pytest.mark.parametrize("after, moved", [({"queued": 0.3}, False), ({"cpu": 0.04, "queued": 0.9}, True)])
def test_a_worker_that_hardly_gets_a_processor(after: dict[str, float], moved: bool) -> None:
    """It stands in line for most of the time; one that only wakes up now and then does so for less."""
    assert Family(**after).moved_since(Family(), 1.0, share=0.05, wakes=2.0) is moved


def test_threads_beside_one(proc: Path) -> None:
    """For how long each has run or could have."""
    assert kernel.wanted_beside(1) == {4712: pytest.approx(2.5)}
    assert kernel.wanted_beside(4712) == {}


def test_a_host_that_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is on it, not even what this process has written."""
    monkeypatch.setattr(kernel, "_PROC", tmp_path / "none")
    kernel._host.cache_clear()
    try:
        assert kernel.host() != kernel.host()
        box = black_box.BlackBox(tmp_path / "box", Disk())
        box.close()
        known = black_box.read(tmp_path / "box")
        assert known is not None
        assert not known.here
    finally:
        kernel._host.cache_clear()


def test_a_system_that_cannot_reserve_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no black box then: an error of the system, as of a full disk."""
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(OSError, match="reserved"):
        black_box.BlackBox(tmp_path / "box", Disk())


# --- real processes ---------------------------------------------------------------------------------------------------


def test_this_process() -> None:
    """It runs, and its numbers grow."""
    before = kernel.process(os.getpid())
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = kernel.process(os.getpid())
    assert before is not None
    assert after is not None
    assert after.cpu - before.cpu > 0.2
    assert after.started == before.started == kernel.started(os.getpid()) > 0
    assert after.moved_since(before, 1.0)
    assert kernel.host() == kernel.host() != ""


def test_a_thread_that_writes_and_one_that_waits() -> None:
    """The bytes that one thread moves are not those of another."""
    end, native = threading.Event(), list[int]()

    def waits() -> None:
        native.append(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    assert until(lambda: native)
    before, own = kernel.thread(native[0]), kernel.thread(threading.get_native_id())
    with Path(os.devnull).open("wb", buffering=0) as null:
        null.write(b"x" * 100_000)
    after, now = kernel.thread(native[0]), kernel.thread(threading.get_native_id())
    end.set()
    thread.join()
    assert before is not None
    assert after is not None
    assert own is not None
    assert now is not None
    assert now.data - own.data >= 100_000
    assert after.data == before.data


def test_a_stopped_process_and_a_dead_one() -> None:
    """What a signal has stopped is no more than that; what has ended tells how until it is collected."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert until(lambda: (known := kernel.process(child.pid)) is not None and known.state == "S")
        child.send_signal(signal.SIGSTOP)
        assert until(lambda: (known := kernel.process(child.pid)) is not None and known.is_stopped)
        child.kill()
        assert until(lambda: (known := kernel.process(child.pid)) is not None and known.is_gone)
        dead = kernel.process(child.pid)
        assert dead is not None
        assert kernel.ending(dead.ended_by or 0) == "it was killed by SIGKILL"
        assert child.pid in kernel.children()
    finally:
        child.kill()
        child.wait()
    assert kernel.process(child.pid) is None


_GRANDCHILD = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: sum(range(1000))"


def test_a_grandchild_that_works_and_one_that_sleeps() -> None:
    """What a shell has started counts as well; one that only waits is idle."""
    for command, moves in ((f"{sys.executable} -c '{_GRANDCHILD}'; true", True), ("sleep 600; true", False)):
        shell = subprocess.Popen(["sh", "-c", command], start_new_session=True)
        try:
            assert until(lambda: kernel.children(shell.pid))  # noqa: B023 - called at once
            time.sleep(0.5)
            before = kernel.family([shell.pid])

            def moved(shell: subprocess.Popen[bytes] = shell, before: Family = before) -> bool:
                return kernel.family([shell.pid]).moved_since(before, 1.0, share=0.05, wakes=2.0)

            assert until(moved, 60 if moves else 2) is moves
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def test_a_child_to_which_data_trickles() -> None:
    """It hardly computes, but something other than time wakes it."""
    server = socket.create_server(("127.0.0.1", 0))
    code = f"import socket; c = socket.create_connection({server.getsockname()})\nwhile c.recv(100): pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        connection, _ = server.accept()
        with server, connection:
            connection.sendall(b"x")
            time.sleep(0.2)
            before = kernel.family([child.pid])
            for _ in range(8):
                connection.sendall(b"x")
                time.sleep(0.1)
            assert until(lambda: kernel.family([child.pid]).wakes - before.wakes > 2)
