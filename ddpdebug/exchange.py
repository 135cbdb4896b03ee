"""The only module that communicates: a tick loop over one small all_gather on a side process group.

Every rank takes part in every tick, with news or without, so no rank ever waits for another one's *step*; what is
waited for is the peer's thread, which is idle for `IDLE_SECONDS` at most. All ranks therefore see the same rows in
the same order and can decide alike without talking about it.

One tick: gather the fixed part (a header and up to `capacity` rows a rank), then, only if some header announced a
payload, gather the variable part (a chunk of each rank's JSON stream, padded to the longest). The capacity of the
next tick follows from the headers of this one, so it is the same everywhere.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ddpdebug.observations import LAYOUT_VERSION, ROW_BYTES

IDLE_SECONDS = 1.0
#: Rows wait until there are so many, or for `IDLE_SECONDS`: waking up costs more than what a row needs. Messages do not
#: wait.
BATCH_ROWS = 4
#: How long a rank that is done waits for the others before it leaves them.
LEAVE_SECONDS = 2.0
#: How long it waits in one gather: the others tick at least every `IDLE_SECONDS`, and at once when somebody leaves.
_SILENCE_SECONDS = 2.0 * IDLE_SECONDS
_CHUNK = 1 << 18
_MAX_MESSAGE = 32 << 20
_MAX_OUTBOX = 64 << 20
_MAX_ROWS = 64
#: So many rows may wait; when the other ranks have not even connected by then, they never will.
_MAX_WAITING = 1024
_HEADER = struct.Struct("<IIqqqq")  # layout version, flags, progress, rows here, rows waiting, payload bytes
_LEAVING, _LEFT, _BUSY = 1, 2, 4


class Group(Protocol):
    """What the loop needs of a process group."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return every member's equally long `data`, in member order."""

    def close(self) -> None:
        """Make a pending gather fail."""


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick brought, equal on all ranks."""

    rows: tuple[tuple[int, bytes], ...]  # (rank, encoded row)
    messages: tuple[tuple[int, dict[str, Any]], ...]  # (rank, JSON)
    members: tuple[int, ...]  # ranks still taking part
    progress: int  # highest `progress` of any rank
    last: bool = False


class Exchange:
    """Runs the tick loop in a daemon thread; `post` and `say` never block and never raise.

    Args:
        connect: called in the thread with (generation, members); returns the group or raises.
        on_tick: called in the thread after every tick; returns True while there is unfinished business
            (a rank that is asked something must not leave).
        on_lost: called once when the group is dead, with the reason; the loop ends.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        connect: Callable[[int, tuple[int, ...]], Group],
        on_tick: Callable[[Tick], bool],
        on_lost: Callable[[str], None],
    ) -> None:
        self.rank, self.world = rank, world
        self.progress = 0
        self.ticks = 0
        self.gathered_bytes = 0
        self._connect, self._on_tick, self._on_lost = connect, on_tick, on_lost
        self._rows: deque[bytes | Callable[[], bytes]] = deque()
        self._outbox = bytearray()
        self._inboxes = [bytearray() for _ in range(world)]
        self._members = tuple(range(world))
        self._generation = 0
        self._group: Group | None = None
        self._wake = threading.Condition()
        self._closing: float | None = None
        self._asked: float | None = None  # since when the thread waits for the others
        self._busy = False
        self._someone_leaves = False  # who ends waits for the ticks of those who go on: these come at once then
        self._over = False  # nothing is sent any more
        self._thread: threading.Thread | None = None

    # --- called from the training thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; does nothing when it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddpdebug", daemon=True)
            self._thread.start()

    def post(self, row: bytes | Callable[[], bytes]) -> None:
        """Queue a row, or a callable that encodes it in the background thread."""
        with self._wake:
            if self._over:
                return
            self._rows.append(row)
            if len(self._rows) >= BATCH_ROWS:
                self._wake.notify()
            if len(self._rows) <= _MAX_WAITING:
                return
        self._give_up(f"{_MAX_WAITING} steps are waiting for the other ranks, which do not answer")

    def say(self, message: dict[str, Any]) -> None:
        """Queue a JSON message to all ranks (this one too); dropped when the outbox is full."""
        data = zlib.compress(json.dumps(message, default=str).encode(), 1)
        with self._wake:
            if len(self._outbox) + len(data) < _MAX_OUTBOX and not self._over:
                self._outbox += struct.pack("<I", len(data)) + data
                self._wake.notify()

    @property
    def impatient(self) -> bool:
        """Tell whether this rank is done and has waited for the others long enough."""
        return self._closing is not None and time.monotonic() - self._closing > LEAVE_SECONDS

    def close(self, timeout: float = LEAVE_SECONDS + 1.0) -> bool:
        """Deliver what is queued, leave, and end the thread; return whether it ended in time."""
        if self._thread is None:
            return True
        if self._over:
            timeout = 0.0  # the thread is gone, or waits for somebody who does not come
        with self._wake:
            if self._closing is None:
                self._closing = time.monotonic()
            self._wake.notify()
        until = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < until and not self._unanswered():
            self._thread.join(0.1)
        if self._thread.is_alive():
            group = self._group
            if group is not None:
                group.close()
            self._thread.join(0.3)
        return not self._thread.is_alive()

    def _unanswered(self) -> bool:
        asked, closing = self._asked, self._closing
        if asked is None or closing is None:
            return False
        return time.monotonic() - max(asked, closing) > _SILENCE_SECONDS

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._group = self._connect(self._generation, self._members)
            while self._tick():
                self._idle()
        except Exception as error:  # noqa: BLE001 - whatever kills the exchange must not reach the job
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._group = None

    def _give_up(self, reason: str) -> None:
        with self._wake:
            known, self._over = self._over, True
            self._rows.clear()  # each holds what a step has left behind
            self._outbox.clear()
        if not known:
            self._on_lost(reason)

    def _idle(self) -> None:
        with self._wake:
            if self._closing is not None or self._busy:
                self._wake.wait(0.005)
            elif self._someone_leaves:
                self._wake.wait(0.02)
            elif not self._outbox and len(self._rows) < BATCH_ROWS:
                self._wake.wait(IDLE_SECONDS)

    def _gather(self, data: bytes) -> list[bytes]:
        assert self._group is not None
        self._asked = time.monotonic()
        gathered = self._group.gather(data)
        self._asked = None
        return gathered

    _capacity = BATCH_ROWS

    def _tick(self) -> bool:
        own = self._message()
        gathered = self._gather(own)
        self.ticks += 1
        self.gathered_bytes += len(own) * len(gathered)
        headers = [_HEADER.unpack_from(data) for data in gathered]
        for header in headers:
            if header[0] != LAYOUT_VERSION:
                raise RuntimeError("ranks run different versions of ddpdebug")
        rows: list[tuple[int, bytes]] = []
        for rank, data, header in zip(self._members, gathered, headers, strict=True):
            for i in range(header[3]):
                start = _HEADER.size + i * ROW_BYTES
                rows.append((rank, data[start : start + ROW_BYTES]))
        messages = self._gather_payload([header[5] for header in headers])
        self._capacity = min(max(BATCH_ROWS, *(header[4] for header in headers)), _MAX_ROWS)
        flags = [header[1] for header in headers]
        quiet = not any(header[4] or header[5] or header[1] & _BUSY for header in headers)
        self._someone_leaves = any(flag & _LEAVING for flag in flags)
        last = quiet and not rows and not messages and all(flag & (_LEAVING | _LEFT) for flag in flags)
        left = {rank for rank, flag in zip(self._members, flags, strict=True) if flag & _LEFT}
        members = tuple(rank for rank in self._members if rank not in left)
        progress = max(header[2] for header in headers)
        self._busy = self._on_tick(Tick(tuple(rows), tuple(messages), members, progress, last))
        if last or self.rank in left:
            return False
        if left:
            self._members, self._generation = members, self._generation + 1
            self._group = self._connect(self._generation, members)
        return True

    def _message(self) -> bytes:
        with self._wake:
            taken = [self._rows.popleft() for _ in range(min(self._capacity, len(self._rows)))]
            waiting, payload = len(self._rows), min(len(self._outbox), _CHUNK)
            flags = _BUSY if self._busy else 0
            if self._closing is not None:
                flags |= _LEAVING
                if self.impatient and not waiting:
                    flags |= _LEFT
        rows = b"".join(row if isinstance(row, bytes) else row() for row in taken)
        head = _HEADER.pack(LAYOUT_VERSION, flags, self.progress, len(taken), waiting, payload)
        return (head + rows).ljust(_HEADER.size + self._capacity * ROW_BYTES, b"\0")

    def _gather_payload(self, sizes: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        if not any(sizes):
            return []
        longest = max(sizes)
        with self._wake:
            size = sizes[self._members.index(self.rank)]
            chunk = bytes(self._outbox[:size])
            del self._outbox[:size]
        gathered = self._gather(chunk.ljust(longest, b"\0"))
        self.gathered_bytes += longest * len(gathered)
        messages = []
        for rank, data, length in zip(self._members, gathered, sizes, strict=True):
            self._inboxes[rank] += data[:length]
            messages += [(rank, message) for message in _frames(self._inboxes[rank])]
        return messages


def _frames(inbox: bytearray) -> list[dict[str, Any]]:
    """Take the complete messages out of a rank's stream."""
    messages = []
    while len(inbox) >= 4:
        (length,) = struct.unpack_from("<I", inbox)
        if len(inbox) < 4 + length:
            break
        raw = zlib.decompressobj().decompress(bytes(inbox[4 : 4 + length]), _MAX_MESSAGE)
        del inbox[: 4 + length]
        messages.append(json.loads(raw))
    return messages


class Alone:
    """The group of a world of one: every tick returns its own data."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data."""
        return [data]

    def close(self) -> None:
        """Do nothing."""
