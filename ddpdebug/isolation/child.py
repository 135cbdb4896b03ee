"""A disposable copy of this process in which user code may run again: all changes end with the copy.

The copy has one thread, the one that asked for it. It has no descriptors, shares no memory, cannot write a file, send
anything or start a process (see `confinement`), and is ended after a while. Nobody in this process can wait for it or
hear of its end but who has made it: it is no child for `os.wait`, sends no `SIGCHLD`, and runs no hook of `os.fork` in
this process. What it answers comes back in a piece of memory.
"""

from __future__ import annotations

import _imp
import _thread
import ctypes
import json
import mmap
import operator
import os
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddpdebug.clock import time
from ddpdebug.disk import free_memory
from ddpdebug.isolation.background import Thread
from ddpdebug.isolation.confinement import UnconfinedError, clone, confinement, shares_memory
from ddpdebug.isolation.guard import Guard

#: How long one forward, and the replay of a step, may take in a copy.
TRIAL_SECONDS, REPLAY_SECONDS = 20.0, 30.0
_ANSWER_BYTES = 1 << 20
_HEAD = struct.Struct("q")
_WALL = 0x40000000  # waits for children that send no signal, too
_SLEEPS = (0.005, 0.1)
_call: Callable[[Any], Any] = operator.call  # `map` has no type for it
_MOST, _END_SECONDS = 2, 1.0
_inside: list[bool] = []  # has something in the copy


def is_disposable() -> bool:
    """Whether this process is a disposable copy."""
    return bool(_inside)


class Child:
    """A running copy, and its answer.

    Args:
        pid: its number.
        memory: where the answer will be.
        seconds: after which it is ended.
    """

    def __init__(self, pid: int, memory: mmap.mmap, seconds: float) -> None:
        self._pid, self._memory, self._seconds = pid, memory, seconds
        self._deadline, self._over = time.monotonic() + seconds, False

    def end(self) -> None:
        """End the copy soon; from any thread."""
        self._over = True

    def answer(self) -> Any:
        """Wait for the end of the copy, and return its answer, a JSON value.

        Raises:
            UnconfinedError: there is no answer; the text is the reason.
        """
        pause, status = _SLEEPS[0], None
        while status is None and not self._over and time.monotonic() < self._deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, _SLEEPS[1])
            status = self._ended(os.WNOHANG)
        late = status is None and not self._over
        if status is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            status = self._ended(0)
        try:
            (size,) = _HEAD.unpack_from(self._memory)
            data = bytes(self._memory[_HEAD.size : _HEAD.size + size]) if 0 < size < _ANSWER_BYTES else b""
        finally:
            self._memory.close()
        found = json.loads(data) if data else {}
        if "answer" in found:
            return found["answer"]
        if "failed" in found:
            raise UnconfinedError(f"it failed: {found['failed']}")
        if self._over:
            raise UnconfinedError("the run ended before it")
        if late or (status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM):
            raise UnconfinedError(f"it did not end within {self._seconds:.0f} s")
        raise UnconfinedError(_how(status or 0))

    def _ended(self, how: int) -> int | None:
        try:
            pid, status = os.waitpid(self._pid, how | _WALL)
        except ChildProcessError:  # somebody waits for children of all kinds
            return 0
        return status if pid else None


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it ended without an answer (exit {os.waitstatus_to_exitcode(status)})"


def start(work: Callable[[], Any], seconds: float) -> Child:
    """Copy this process and run `work` in the copy, which returns a JSON value; takes as long as a `fork`.

    Raises:
        UnconfinedError: there is no copy; the text is the reason.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnconfinedError("nothing is run again in a Python without a global lock")
    if _children_are_elsewhere():
        raise UnconfinedError("the first child of a new namespace, without which it can have no other, is the script's")
    if _filters() != _FILTERS:
        raise UnconfinedError("the script has filtered its system calls, and may be killed for a copy")
    room = _room()
    parent, made = os.getpid(), clone()
    try:
        memory = mmap.mmap(-1, _ANSWER_BYTES)
        own = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        confined = confinement(seconds, own, room)
    except OSError as error:
        raise UnconfinedError(f"the process could not be copied: {error.strerror}") from None
    renew = ctypes.pythonapi.PyOS_AfterFork_Child
    renew.restype = None
    # No code in Python runs between these: a thread that waits for the interpreter is not in the copy, and would be
    # waited for there. The copy's number ends the row here; there it is 0, and the row goes on while all is false.
    row = (made, partial(_inside.append, True), *confined.steps, renew)
    pid = -1
    try:
        _imp.acquire_lock()  # as `os.fork` does
        pid = next(filter(None, map(_call, row)), 0)
    finally:
        if os.getpid() != parent:
            _work(work, memory, own, parent, begun=pid == 0)
        with suppress(RuntimeError):  # a signal's handler may have come between
            _imp.release_lock()
    if pid < 0:
        raise UnconfinedError("the process could not be copied")
    return Child(pid, memory, seconds)


def _work(work: Callable[[], Any], memory: mmap.mmap, own: int, parent: int, *, begun: bool) -> NoReturn:
    """Do the work and leave, whatever happens: the script must not go on here."""
    ready = False
    try:
        ready = begun and os.getppid() == parent and not shares_memory(own)
        if ready:
            try:
                found = {"answer": work()}
            except BaseException as error:  # noqa: BLE001 - nothing of this process may go on
                found = {"failed": f"{type(error).__name__}: {error}"[:300]}
            data = json.dumps(found, default=str).encode()
            if len(data) > _ANSWER_BYTES - _HEAD.size:
                data = json.dumps({"failed": "what it has found is too long"}).encode()
            memory[_HEAD.size : _HEAD.size + len(data)] = data
            _HEAD.pack_into(memory, 0, len(data))
    finally:
        os._exit(0 if ready else 1)


def _children_are_elsewhere() -> bool:
    """Return whether the script has called `unshare(CLONE_NEWPID)`."""
    try:
        own = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False
    try:
        return Path("/proc/self/ns/pid_for_children").readlink() != own
    except OSError:  # the namespace has nobody in it yet
        return True


def _filters() -> str:
    """Return how many filters (seccomp) the process's system calls pass; a container's are there from the start."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return "".join([line for line in lines if line.startswith("Seccomp")])


_FILTERS = _filters()


def _room() -> int:
    """Return the bytes that a copy may take: what both write from now on is there twice."""
    free = min(free_memory(), default=None)
    pages = [int(word) for word in Path("/proc/self/statm").read_text("utf-8").split()]
    own = (pages[1] - pages[2]) * mmap.PAGESIZE
    if free is not None and 2 * own > free:
        raise UnconfinedError(f"a copy of {own >> 20} MiB may not fit into the {free >> 20} MiB that are free")
    return (free or own) // 2


class Children:
    """The running copies of this process.

    Args:
        guard: under which their answers are taken.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._running: list[tuple[Child, _thread.LockType]] = []

    def run(
        self, part: str, work: Callable[[], Any], seconds: float, take: Callable[[Any, str | None], object]
    ) -> str | None:
        """Run `work` in a copy, without waiting; return the reason if that is not possible, else None.

        Args:
            part: that is switched off where its answer cannot be taken.
            take: called in another thread with the answer, or with None and the reason why there is none.
        """
        self._running = [entry for entry in self._running if entry[1].locked()]
        if len(self._running) >= _MOST:
            return f"{_MOST} others were still running"
        try:
            child = start(work, seconds)
        except UnconfinedError as error:
            return str(error)
        over = _thread.allocate_lock()
        over.acquire()

        def follow() -> None:
            try:
                self._guard.contain(part, take, *_answer_of(child))
            finally:
                over.release()

        self._running.append((child, over))
        try:
            Thread("ddpdebug-child", follow)
        except RuntimeError as error:  # the process may have no more threads
            child.end()
            _answer_of(child)
            over.release()
            return str(error)
        return None

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the running copies, and then end them."""
        until = time.monotonic() + seconds
        running, self._running = self._running, []
        for child, over in running:
            if not over.acquire(timeout=max(0.0, until - time.monotonic())):
                child.end()
                if not over.acquire(timeout=_END_SECONDS):
                    self._running.append((child, over))


def _answer_of(child: Child) -> tuple[Any, str | None]:
    try:
        return child.answer(), None
    except UnconfinedError as error:
        return None, str(error)
