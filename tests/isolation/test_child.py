"""A disposable child computes what it is asked to, and nobody hears, sees or waits for anything of it."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import until

from ddpdebug import torch_internals as internals
from ddpdebug.isolation import child as module, confinement
from ddpdebug.isolation.child import Children, UnconfinedError, is_disposable, start
from ddpdebug.isolation.guard import Guard

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def _answer(work: Callable[[], Any], seconds: float = 60.0) -> Any:
    return start(work, seconds).answer()


def test_the_answer_comes_back() -> None:
    """Whatever JSON can say; the child knows that it is one, and its numbers are those of one thread."""

    def work() -> Any:
        internals.use_one_thread()
        x = torch.ones(40, 40, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        return [is_disposable(), float(x.grad.sum()), os.getppid() == parent]

    parent = os.getpid()
    assert _answer(work) == [True, 40.0**2 * 80, True]
    assert not is_disposable()


def test_what_it_changes_is_gone(tmp_path: Path) -> None:
    """Memory of its own, memory that is shared with other processes, and files that are mapped into memory."""
    value, tensor, own = multiprocessing.Value("i", 1), torch.zeros(3).share_memory_(), [0]
    (tmp_path / "mapped").write_bytes(bytes(mmap.PAGESIZE))
    with (tmp_path / "mapped").open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:

        def work() -> Any:
            with value.get_lock():
                value.value += 1
            tensor.add_(1)
            mapped[0] += 1
            own.append(1)
            return [value.value, tensor.tolist(), mapped[0], own]

        assert _answer(work) == [2, [1, 1, 1], 1, [0, 1]]
        assert (value.value, tensor.tolist(), mapped[0], own) == (1, [0, 0, 0], 0, [0])


def test_much_shared_memory_can_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large to be copied ends the child where it is written."""
    monkeypatch.setattr(confinement, "COPIED_BYTES", 0)
    tensor = torch.ones(3).share_memory_()
    assert _answer(lambda: tensor.sum().item()) == 3
    with pytest.raises(UnconfinedError, match="ended by SIGSEGV"):
        _answer(lambda: tensor.add_(1).tolist())
    assert tensor.tolist() == [1, 1, 1]


_FORBIDDEN: dict[str, Callable[[Path], Any]] = {
    "writes a file": lambda path: (path / "new").write_text("x"),
    "empties a file": lambda path: (path / "old").open("w"),
    "appends": lambda path: (path / "old").open("a"),
    "removes": lambda path: (path / "old").unlink(),
    "renames": lambda path: (path / "old").rename(path / "other"),
    "makes a directory": lambda path: (path / "folder").mkdir(),
    "changes a mode": lambda path: (path / "old").chmod(0),
    "truncates": lambda path: os.truncate(path / "old", 0),
    "links": lambda path: (path / "link").symlink_to(path / "old"),
    "forks": lambda _: os.fork(),
    "starts a program": lambda _: os.execv("/bin/true", ["true"]),
    "sends a signal": lambda _: os.kill(os.getppid(), signal.SIGUSR1),
    "connects": lambda _: socket.socket(),
    "changes another process": lambda _: os.setpriority(os.PRIO_PROCESS, os.getppid(), 1),
}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_nothing_reaches_the_outside(what: str, tmp_path: Path) -> None:
    """The kernel refuses it, and the disk is as it was."""
    (tmp_path / "old").write_text("kept")

    def work() -> str:
        try:
            _FORBIDDEN[what](tmp_path)
        except OSError as error:
            return type(error).__name__
        return "done"

    assert _answer(work) == "PermissionError"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "kept")]


def test_descriptors_lead_nowhere(tmp_path: Path) -> None:
    """Files, pipes and sockets that are open: what is written is lost, and nothing is read from them."""
    reader, writer = os.pipe()
    one, other = socket.socketpair()
    os.write(writer, b"for the job")
    with (tmp_path / "log").open("w+") as log:
        log.write("first ")

        def work() -> Any:
            log.write("second")
            log.flush()
            os.write(writer, b"more")
            os.write(1, b"printed")
            try:
                one.send(b"x")
            except OSError as error:
                return [os.read(reader, 100).decode(), type(error).__name__]
            return "sent"

        assert _answer(work) == ["", "PermissionError"]
    assert (tmp_path / "log").read_text() == "first "
    assert os.read(reader, 100) == b"for the job"
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)
    for end in (reader, writer):
        os.close(end)
    one.close()
    other.close()


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What hooks of forks and a handler of SIGCHLD hear in this process."""
    found: list[str] = []
    hooks = {when: (lambda when=when: found.append(when)) for when in ("before", "after_in_parent")}
    os.register_at_fork(**hooks, after_in_child=lambda: found.append("child"))
    old = signal.signal(signal.SIGCHLD, lambda *_: found.append("SIGCHLD"))
    yield found
    signal.signal(signal.SIGCHLD, old)


def test_nobody_hears_of_it(heard: list[str]) -> None:
    """No hook of forks runs here, no signal comes, and who waits for children finds none."""

    def check() -> None:
        heard.clear()
        known = multiprocessing.active_children()
        child = start(lambda: heard, 60)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert multiprocessing.active_children() == known
        assert child.answer() == ["child"]  # there it runs, where it can do nothing
        assert heard == []
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    assert _failure_in_a_fork(check) == ""


def _failure_in_a_fork(check: Callable[[], None]) -> str:
    """Run a check in a process that has no children, whatever this one's other tests have left behind."""
    reader, writer = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            check()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - all of it is what is asked for
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    return text or ("" if status == 0 else f"exit {status}")


def test_threads_that_wait_for_the_interpreter() -> None:
    """A copy is made while others want to run Python's code; it does not wait for them."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(100))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [_answer(lambda: 7) for _ in range(3)] == [7, 7, 7]
    finally:
        over.set()
        for thread in threads:
            thread.join()


_ENDS: dict[str, tuple[Callable[[], Any], float, str]] = {
    "waits": (lambda: threading.Lock().acquire() and _for_ever(), 1.0, "did not end within 1 s"),
    "crashes": (lambda: ctypes.string_at(0), 60.0, "ended by SIGSEGV"),
    "leaves": (lambda: os._exit(3), 60.0, r"without an answer \(exit 3\)"),
    "raises": (lambda: {}[0], 60.0, "failed: KeyError"),
    "ends the program": (lambda: (_ for _ in ()).throw(SystemExit(2)), 60.0, "failed: SystemExit"),
    "says too much": (lambda: "x" * (2 << 20), 60.0, "too long"),
}


def _for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("how", _ENDS)
def test_an_end_without_an_answer(how: str) -> None:
    """The reason is said, and this process goes on."""
    work, seconds, text = _ENDS[how]
    with pytest.raises(UnconfinedError, match=text):
        _answer(work, seconds)


def test_it_is_not_waited_for_at_the_end() -> None:
    """What is still at work when the run ends is ended, and its reason taken."""
    told: list[Any] = []
    children = Children(GUARD)
    assert children.run("test", _for_ever, 600, lambda *found: told.append(found)) is None
    children.finish(0.1)
    children.finish(60)  # the machine may be slow
    assert told == [(None, "the run ended before it")]


def test_it_dies_with_its_process() -> None:
    """A rank that is gone leaves nothing at work."""
    reader, writer = os.pipe()
    if (rank := os.fork()) == 0:
        try:
            os.write(writer, str(start(_for_ever, 600)._pid).encode())
        finally:
            os._exit(0)
    os.waitpid(rank, 0)
    pid = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    assert until(lambda: _state(pid) in {None, "Z"})  # who takes its parent's place may not have asked for its end yet


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def test_no_more_than_a_few_at_once() -> None:
    """One more is refused with the reason."""
    children = Children(GUARD)
    assert [children.run("test", _for_ever, 600, lambda *_: None) for _ in range(3)] == [
        None,
        None,
        "2 others were still running",
    ]
    children.finish(0)


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is large for what is free is not copied, and a copy cannot take more than it may."""
    monkeypatch.setattr(module, "free_memory", lambda: [1 << 20])
    with pytest.raises(UnconfinedError, match="may not fit into the 1 MiB"):
        start(lambda: None, 60)
    monkeypatch.setattr(module, "_room", lambda: 64 << 20)
    with pytest.raises(UnconfinedError, match="failed: "):
        _answer(lambda: bytearray(256 << 20) and 1)


def test_no_copy_behind_a_filter_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that came after the attach may kill the job for a copy; a container's was there before."""
    assert module._filters() == module._FILTERS
    monkeypatch.setattr(module, "_FILTERS", "Seccomp: 0")
    with pytest.raises(UnconfinedError, match="filtered its system calls"):
        start(lambda: 1, 5.0)


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the filter is not known nothing is copied."""
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnconfinedError, match="Linux on riscv64"):
        start(lambda: None, 60)


def test_it_is_the_first_to_go() -> None:
    """Its priority is lower than ours, the kernel ends it first when memory runs out, and its name says what it is."""

    def work() -> Any:
        names = ("comm", "oom_score_adj")
        return [Path(f"/proc/self/{name}").read_text().strip() for name in names] + [os.getpriority(os.PRIO_PROCESS, 0)]

    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert _answer(work) == ["ddpdebug-replay", "1000", max(1, ours)]
