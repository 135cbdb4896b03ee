"""The timer of `faulthandler`, which a process has once: used only if nobody else uses it. Torch-free.

It writes the stacks of all threads at a moment that is set in advance, from a thread of its own that needs no
interpreter's lock. Whoever sets it cancels what was set before, so two rules keep the script's own use whole:

- it is not set where a thread of that kind may wait already: one that blocks all signals, as the kernel shows it;
- once it is ours, `faulthandler` alone holds what we have given it as a file. Where that has died, the script has set
  or cancelled the timer, and we never touch it again in this process.

Frames are read while they change where the process still runs Python at that moment, which may end it by SIGSEGV
(measured with Python 3.11: within some dumps). So it is set for the end of a job's time alone.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

from ddpdebug.clock import time

_TASKS = Path("/proc/self/task")
#: How long a fork waits for a change of the timer in another thread, which takes microseconds.
_PATIENCE_SECONDS = 1.0
#: Bits of a thread's mask of blocked signals that no thread can block or that the C library keeps: 9, 19, 32, 33.
_NEVER_BLOCKED = 1 << 8 | 1 << 18 | 3 << 31


class _Handle:
    """A file as `faulthandler` is given it: its death tells that the timer is not ours any more."""

    def __init__(self, file: IO[Any]) -> None:
        self.fileno, self.flush = file.fileno, file.flush


class DumpTimer:
    """The timer of this process; usable from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._held = False  # the lock, around a fork
        self._pid = 0
        self._wanted: tuple[float, IO[Any]] | None = None  # moment of the monotonic clock, and file
        self._is_set = False
        self._is_lost = False  # to the script, for as long as the process lives
        self._handle: Callable[[], _Handle | None] = lambda: None

    def set(self, moment: float, file: IO[Any]) -> bool:
        """Schedule the stacks to be written to a file at a moment; return whether that was possible."""
        _rest_around_forks()
        with self._changing:
            if self._pid != os.getpid():
                self._begin()
            if self._is_others():
                return False
            self._wanted = moment, file
            return self._arm()

    def _begin(self) -> None:
        self._pid, self._wanted, self._is_set, self._is_lost = os.getpid(), None, False, False

    def _is_others(self) -> bool:
        """Return whether somebody else uses the timer, or has taken it from us."""
        if self._is_set and self._handle() is None:
            self._wanted, self._is_set, self._is_lost = None, False, True
        return self._is_lost or (not self._is_set and _may_be_set())

    def _arm(self) -> bool:
        assert self._wanted is not None
        moment, file = self._wanted
        try:
            handle: Any = _Handle(file)
            self._handle = weakref.ref(handle)
            faulthandler.dump_traceback_later(max(moment - time.monotonic(), 0.01), file=handle)
        except Exception:  # noqa: BLE001 - no thread to be had, or a file that somebody has closed
            self._is_set = False
        else:
            self._is_set = True
        return self._is_set

    # --- forks --------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """End the timer's thread before a fork.

        A child does not have the thread, and would wait for it without end: as it ends, or where it sets its own.
        """
        self._held = self._changing.acquire(timeout=_PATIENCE_SECONDS)
        if self._pid == os.getpid() and self._is_set and not self._is_others():
            faulthandler.cancel_dump_traceback_later()

    def go_on(self) -> None:
        """Set the timer again in the parent after a fork; stacks already written are not written again."""
        try:
            if self._pid == os.getpid() and self._is_set and self._wanted is not None:
                if self._wanted[0] > time.monotonic():
                    self._arm()
                else:
                    self._is_set = False
        finally:
            held, self._held = self._held, False
            if held:
                self._changing.release()

    def in_child(self) -> None:
        """Reset the timer in a forked child, to which nothing of it belongs."""
        self._changing, self._held = threading.Lock(), False
        self._begin()


TIMER = DumpTimer()


@cache
def _rest_around_forks() -> None:
    """Have forks go by the timer, for ever: a hook of a fork cannot be taken away."""
    os.register_at_fork(before=TIMER.rest, after_in_parent=TIMER.go_on, after_in_child=TIMER.in_child)


def _may_be_set() -> bool:
    """Return whether somebody's timer may wait in this process; where the kernel does not report it, it may."""
    try:
        return any(map(_waits_as_the_timer, _TASKS.iterdir()))
    except OSError:
        return True


def _waits_as_the_timer(task: Path) -> bool:
    try:
        lines = (task / "status").read_text(encoding="ascii", errors="replace").splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        where = (task / "wchan").read_text(encoding="ascii", errors="replace").strip()
    except (OSError, ValueError, IndexError, StopIteration):
        return False  # it has ended meanwhile
    return (blocked | _NEVER_BLOCKED) == (1 << 64) - 1 and (where in {"", "0"} or where.startswith("futex"))
