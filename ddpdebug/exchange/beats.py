"""Signs of life through the job's store, for ranks of other hosts: only while a gather is unanswered.

Each rank that lives sets one key of its own once a second then; whoever may have to judge reads those of ranks that it
cannot see otherwise, a bounded number a second. A thread of its own calls the store, which may block, and nobody waits
for it. After the first call that fails there is none any more: a store that has gone prints its stack at each.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ddpdebug.clock import time
from ddpdebug.isolation.background import Thread

EVERY_SECONDS = 1.0
#: Keys that are read in a second.
MOST_READ = 256
#: How long nobody has to ask for the thread to end.
_REST_SECONDS = 3.0
_CALL_SECONDS = datetime.timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Heard:
    """The value that a rank has set last, with the time since when, and whether it changed while this rank read.

    Args:
        read: when it was looked at last; of many ranks each one only now and then.
    """

    value: bytes
    since: float
    lives: bool
    read: float

    def unchanged(self, now: float) -> float:
        """Return the seconds for which the value is known not to have changed."""
        return min(now, self.read + EVERY_SECONDS) - self.since


class Beats:
    """The signs of life of one rank; used by one thread, beside its own.

    Args:
        connect: returns a connection of our own to the job's store, None where there is none.
        prefix: of the keys, the same on all ranks of a meeting.
    """

    def __init__(self, connect: Callable[[], Any | None], prefix: Callable[[], str], rank: int) -> None:
        self._connect, self._prefix, self._rank = connect, prefix, rank
        self._store: Any = None
        self._thread: Thread | None = None
        self._own = b""
        self._asked: tuple[int, ...] = ()
        self._next = 0
        self._until = 0.0
        self._pending: float | None = None
        self._heard: dict[int, Heard] = {}
        self._missed: dict[int, float] = {}  # rank that had set nothing -> when it was looked for last
        self._began = 0.0
        self.is_over = False  # the store has failed

    def keep(self, own: bytes, ranks: Sequence[int]) -> None:
        """Set this rank's sign of life and read those of other ranks, for a while from now."""
        self._own, self._asked, now = own, tuple(ranks), time.monotonic()
        if self.is_over:
            return
        if now > self._until or self._thread is None:
            self._heard, self._missed, self._began = {}, {}, now
        self._until = now + _REST_SECONDS
        if self._thread is None or not self._thread.is_alive():
            with suppress(RuntimeError):  # the process may have no more threads
                self._thread = Thread("ddpdebug-beats", self._run)

    def heard(self) -> dict[int, Heard]:
        """Return the values read since reading began, by rank."""
        return dict(self._heard)

    def missed(self) -> dict[int, float]:
        """Return the ranks that have set nothing, with the time of the last look."""
        return dict(self._missed)

    def unanswered(self) -> float:
        """Return the seconds for which a call of the store has been unanswered."""
        pending = self._pending
        return 0.0 if pending is None else time.monotonic() - pending

    def let_go(self) -> None:
        """Drop the connection until `keep` is called again."""
        self._until, self._store = 0.0, None

    def close(self) -> None:
        """End the thread unless it waits for the store, and drop the connection."""
        self._until, self.is_over, thread = 0.0, True, self._thread
        if thread is not None:
            thread.join(0.3)
        self._store = None  # one in a file deletes that with its last connection

    def _run(self) -> None:
        while time.monotonic() < self._until and not self.is_over:
            begun = time.monotonic()
            self._pending = begun
            try:
                self._round()
            except Exception:  # noqa: BLE001 - the store has gone, is of another kind, or has no time
                self.is_over = True
                return
            self._pending = None
            while time.monotonic() < min(begun + EVERY_SECONDS, self._until):
                time.sleep(0.1)

    def _round(self) -> None:
        if self._store is None:
            self._store = self._connect()
            self._store.set_timeout(_CALL_SECONDS)
        store, prefix = self._store, f"{self._prefix()}/beats"
        store.set(f"{prefix}/{self._rank}", self._own)
        self._pending = time.monotonic()
        asked = self._asked
        if not asked:
            return
        start = self._next % len(asked) if len(asked) > MOST_READ else 0
        chosen = (asked[start:] + asked[:start])[:MOST_READ]
        self._next = start + len(chosen)
        there = [rank for rank in chosen if store.check([f"{prefix}/{rank}"])]
        self._pending = now = time.monotonic()
        self._missed |= dict.fromkeys(set(chosen) - set(there), now)
        for rank, value in zip(there, store.multi_get([f"{prefix}/{rank}" for rank in there]), strict=True):
            self._note(rank, bytes(value))

    def _note(self, rank: int, value: bytes) -> None:
        known, now = self._heard.get(rank), time.monotonic()
        if known is None or known.value != value:
            self._heard[rank] = Heard(value, now, lives=known is not None, read=now)
        else:
            self._heard[rank] = replace(known, read=now)
