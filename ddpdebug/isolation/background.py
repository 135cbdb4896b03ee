"""The background threads of ddpdebug: `threading` does not list them, and a script's thread settings do not reach them.

A script counts, lists, joins, traces and profiles the threads of its process through `threading`. So ours are started
below it. What runs in one never calls `threading.current_thread()`, nor what does that (`logging`, pools of threads):
it would be listed after all. As with daemons, the interpreter ends without waiting; what must end before is joined.

Signals are the script's: one that it has blocked, to wait for it, would otherwise be delivered to a thread of ours, and
end the process. Processes that such a thread starts inherit that. Torch-free.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` and `threading` load much before the script does
import _thread
import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Those that are not caused by what the thread itself has done.
_FROM_OUTSIDE = _signal.valid_signals() - {
    _signal.SIGABRT,
    _signal.SIGBUS,
    _signal.SIGFPE,
    _signal.SIGILL,
    _signal.SIGSEGV,
    _signal.SIGSYS,
    _signal.SIGTRAP,
}
#: Of those that run: number of the thread -> process, name.
_running: dict[int, tuple[int, str]] = {}


def names() -> dict[int, str]:
    """Return the names of ddpdebug's running threads in this process, by identity."""
    own = os.getpid()
    return {ident: name for ident, (pid, name) in _running.copy().items() if pid == own}


class Thread:
    """A background thread that runs one call from its construction on; an exception ends the thread and nothing else.

    Args:
        name: for people who look at the stacks of the process.

    Raises:
        RuntimeError: the process may have no more threads.
    """

    def __init__(self, name: str, call: Callable[..., object], *args: Any) -> None:
        self._pid, self._ident, self._runs = os.getpid(), 0, _thread.allocate_lock()
        self._runs.acquire()  # until it has ended, and by whoever waits for that in the moment in which he learns it
        self._over = False
        _thread.start_new_thread(self._run, (name, call, args))

    def _run(self, name: str, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _FROM_OUTSIDE)
        self._ident = _thread.get_ident()
        _running[self._ident] = self._pid, name
        with suppress(BaseException):  # the script's hooks must not hear of it; who has something to say has caught it
            call(*args)
        _running.pop(self._ident, None)
        self._over = True
        self._runs.release()

    def is_alive(self) -> bool:
        """Whether the thread runs; always False in a forked child."""
        return not self._over and self._pid == os.getpid()

    def is_here(self) -> bool:
        """Whether the caller runs in this thread."""
        return self.is_alive() and self._ident == _thread.get_ident()

    def join(self, seconds: float = -1.0) -> None:
        """Wait until the thread has ended, at most `seconds` if given."""
        if self.is_alive() and self._runs.acquire(timeout=seconds):
            self._runs.release()


class Timer(Thread):
    """A background thread that makes a call after some seconds, unless it is cancelled."""

    def __init__(self, name: str, seconds: float, call: Callable[..., object], *args: Any) -> None:
        self._waits = _thread.allocate_lock()
        self._waits.acquire()
        super().__init__(name, self._wait, seconds, call, args)

    def _wait(self, seconds: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self._waits.acquire(timeout=seconds):
            call(*args)

    def cancel(self) -> None:
        """Cancel the call, if it has not begun."""
        with suppress(RuntimeError):  # once is enough
            self._waits.release()
