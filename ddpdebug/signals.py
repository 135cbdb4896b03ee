"""Signals that come of a write, kept away from a script that has not written anything."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: Nobody reads, a file that is too large, a terminal whose foreground is another job.
_OF_WRITES = frozenset({signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU})


@contextmanager
def without_signals() -> Iterator[None]:
    """Let no write of this thread bring about a signal; the error that comes with it is raised."""
    before, waiting = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.sigpending()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_WRITES)  # may raise what a handler of the script raises
        yield
    finally:
        try:
            if came := (signal.sigpending() - waiting) & _OF_WRITES:
                signal.sigtimedwait(came, 0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
