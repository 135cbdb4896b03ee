"""The only module that communicates: a tick loop over one small all_gather on a side process group.

Every rank takes part in every tick, with news or without, so no rank ever waits for another one's *step*; what is
waited for is the peer's thread, which is idle for `IDLE_SECONDS` at most. All ranks therefore see the same rows in
the same order and can decide alike without talking about it.

One tick: gather the fixed part (a header and up to `capacity` rows a rank), then, only if some header announced a
payload, gather the variable part (a chunk of each rank's JSON stream, padded to the longest). The capacity of the
next tick follows from the headers of this one, so it is the same everywhere.

Before the first tick the ranks meet (`connect`); how they find each other is told in `exchange/meeting.py`.
"""

from __future__ import annotations

import json
import math
import queue
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ddpdebug.clock import time
from ddpdebug.isolation.background import Thread
from ddpdebug.schema.row import LAYOUT_VERSION, ROW_BYTES
from ddpdebug.sinks.words import ranks_text

if TYPE_CHECKING:
    from ddpdebug.exchange.partial import Key, StepPart

IDLE_SECONDS = 1.0
#: Rows wait until there are so many, or for `IDLE_SECONDS`: waking up costs more than what a row needs. Messages do not
#: wait.
BATCH_ROWS = 4
#: How long a rank that is done waits for the others before it leaves them; where one of them has unfinished business
#: (a question, a companion that has just been started), longer.
LEAVE_SECONDS, BUSY_SECONDS = 2.0, 10.0
#: How long it waits in one gather: the others tick at least every `IDLE_SECONDS`, and at once when somebody leaves.
_SILENCE_SECONDS = 2.0 * IDLE_SECONDS
#: How long its thread may take to come back from a gather that was dropped: it looks every half second.
_DROP_SECONDS = 1.0
#: How long the store is asked why another rank has gone.
_WORD_SECONDS = 2.0
_CHUNK = 1 << 18
MAX_MESSAGE = 32 << 20
MAX_OUTBOX = 64 << 20
MAX_ROWS = 64
#: So many rows may wait for the other ranks. A rank that has not met them yet drops the oldest, and waits this long.
_MAX_WAITING = 1024
MEET_SECONDS = 60.0
_HEADER = struct.Struct("<IIqqqq")  # layout version, flags, progress, rows here, rows waiting, payload bytes
_LEAVING, _LEFT, _BUSY = 1, 2, 4

#: `Exchange.state`. The ranks look for each other; are compared; can no longer be (`reason` says why); have all left.
MEETING, COMPARING, LOST, ENDED = "meeting", "comparing", "lost", "ended"
#: There is one rank, or the job has no process group now: nothing to compare.
ALONE = "alone"

T = TypeVar("T")


def wire_format() -> str:
    """Return a description of the wire format, which must be equal on two ranks."""
    return f"{LAYOUT_VERSION:08x} ({ROW_BYTES} bytes, header {_HEADER.size})"


class Group(Protocol):
    """The process group as the tick loop uses it."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return every member's equally long `data`, in member order."""

    def close(self) -> None:
        """Make a pending gather fail."""

    def leave_word(self, text: str) -> None:
        """Write the reason why this rank leaves, for ranks whose gathers are about to fail."""

    def word(self) -> str | None:
        """Return the reason that a rank has left behind; None if there is none."""


#: Who says something, and what, as JSON.
Said = tuple[tuple[int, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Tick:
    """The result of one tick, equal on all ranks except for the reports."""

    rows: tuple[tuple[int, bytes], ...]  # (rank, encoded row)
    messages: tuple[Said, ...]
    members: tuple[int, ...]  # ranks still taking part
    progress: int  # highest `progress` of any rank
    apart: int = 0  # steps by which the slowest rank is behind the fastest; 0 where they take each step together
    parts: Mapping[Key, StepPart] = field(default_factory=dict)  # of many ranks, in the place of rows
    reports: tuple[Said, ...] = ()  # likewise, to this rank


class _Silence(Exception):  # noqa: N818 - no error of anybody
    """A gather brought no answer: a rank has gone, or the time is over."""


class Exchange:
    """Runs the tick loop in a thread; `post` and `say` never block and never raise.

    `state` and `reason` may be read from any thread: `meeting` (`missing` are the ranks that have not come, as far as
    this rank knows), `comparing`, `alone`, `lost` or `ended`.

    Args:
        connect: called in the thread with (generation, members); returns the group or raises, a ConnectionError with
            a text for people.
        on_tick: called in the thread after every tick; returns True while there is unfinished business
            (a rank that is asked something must not leave).
        on_lost: called once when the group is dead, with the reason; the loop ends. From the thread, or from the one
            that posts.
        on_trouble: told (part, message) of a row or message that was dropped.
        is_users: tells an exception of a signal handler of the script's, which `say` lets through, from one of ours.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        connect: Callable[[int, tuple[int, ...]], Group],
        on_tick: Callable[[Tick], bool],
        on_lost: Callable[[str], None],
        on_trouble: Callable[[str, str], None] = lambda part, message: None,
        is_users: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self.rank, self.world = rank, world
        self.state, self.reason = ALONE if world == 1 else MEETING, ""
        self.missing: tuple[int, ...] = ()
        self.progress = 0
        self.ticks = 0
        self.gathered_bytes = 0
        self._connect, self._on_tick, self._on_lost = connect, on_tick, on_lost
        self._on_trouble, self._is_users, self._told = on_trouble, is_users, set[str]()
        self._rows: deque[bytes | Callable[[], bytes]] = deque()
        self._outbox = bytearray()
        self._group: Group | None = None
        self._become(tuple(range(world)), 0)
        # a `with` over the lock itself is C: no signal handler's exception can come between taking it and letting it go
        self._wake_lock = threading.RLock()
        # likewise in C: a `Condition` takes a RecursionError that a handler raises for an error of its own
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started = time.monotonic()
        self._closing: float | None = None
        self.parting = False  # it leaves the others and goes on alone; else it ends
        self._parted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rejoins, self._rows_alone = False, 0  # rows of steps that were taken without the others
        self._asked: float | None = None  # since when the thread waits for the others
        self._busy = False
        self._everyone_waits = False  # a rank has unfinished business, which needs the others' ticks
        self._someone_leaves = False  # who ends waits for the ticks of those who go on: these come at once then
        self._over = False  # nothing is sent any more
        self._last_word = ""  # to the others, where they do not know why this rank goes
        self._thread: Thread | None = None

    # --- called from the training thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; do nothing if it runs already."""
        if self._thread is not None:
            return
        self._started = time.monotonic()
        try:
            self._thread = Thread("ddpdebug", self._run)
        except RuntimeError as error:  # the process may have no more threads
            self.lose(str(error))

    def post(self, row: bytes | Callable[[], bytes]) -> None:
        """Queue a row, or a callable that encodes it in the background thread."""
        with self._wake_lock:
            if self._over:
                return
            self._rows.append(row)
            if len(self._rows) >= BATCH_ROWS:
                self._wake.put(None)
            if len(self._rows) <= _MAX_WAITING:
                return
            if self.state == MEETING and time.monotonic() - self._started < MEET_SECONDS:
                self._rows.popleft()  # too old when the ranks meet
                return
        self.lose(self.unmet() if self.state == MEETING else f"{_MAX_WAITING} steps wait for ranks that are silent")

    @property
    def lost(self) -> bool:
        """Return whether the ranks can no longer be compared."""
        return self._over

    def unmet(self) -> str:
        """Describe the ranks that have not come to the meeting."""
        who = ranks_text(self.missing) if self.missing else "some rank"
        return f"no word from {who}: without ddpdebug, not attached yet, or out of reach"

    def say(self, message: dict[str, Any], *, report: bool = False) -> bool:
        """Queue a JSON message to all ranks (this one too); return whether it will be sent.

        Args:
            report: of many ranks only the first need hear it.

        Dropped are messages that JSON cannot say, which is told once for each kind, and all when the outbox is full.
        """
        try:
            data = zlib.compress(json.dumps(message, default=str).encode(), 1)
        except Exception as error:
            if self._is_users(error):
                raise
            # circular, too deep, or the `str` of somebody's object raises
            self._tell(f"message:{message.get('kind')}", f"{type(error).__name__}: {error}")
            return False
        with self._wake_lock:
            if self._over or not self._put(data, report=report):
                return False
            self._wake.put(None)
        return True

    def _put(self, data: bytes, *, report: bool) -> bool:
        del report  # all ranks hear everything
        if len(self._outbox) + len(data) >= MAX_OUTBOX:
            return False
        self._outbox += struct.pack("<I", len(data)) + data
        return True

    def _has_words(self) -> bool:
        return bool(self._outbox)

    def _forget_words(self) -> None:
        self._outbox.clear()

    def _tell(self, part: str, message: str) -> None:
        if part not in self._told:
            self._told.add(part)
            with suppress(Exception):  # whoever is told must not end what tells
                self._on_trouble(part, message)

    @property
    def impatient(self) -> bool:
        """Return whether this rank is done and has waited for the others long enough."""
        return self._closing is not None and time.monotonic() - self._closing > self._patience

    @property
    def _patience(self) -> float:
        return max(BUSY_SECONDS, LEAVE_SECONDS) if self._busy or self._everyone_waits else LEAVE_SECONDS

    def close(self, timeout: float | None = None) -> bool:
        """Send all queued data, leave, and end the thread; return whether the thread is idle.

        It may still connect to a rank that has gone meanwhile; nothing comes of that.

        Args:
            timeout: seconds; None is a second more than the others are waited for.
        """
        if self._thread is None:
            return True
        if self._over:
            timeout = 0.0  # the thread is gone, or waits for somebody who does not come
        with self._wake_lock:
            self.parting = False
            if self._closing is None:
                self._closing = time.monotonic()
            self._wake.put(None)
        began = time.monotonic()
        while self._thread.is_alive() and not self._unanswered():
            if time.monotonic() - began > (self._patience + 1.0 if timeout is None else timeout):
                break
            self._thread.join(0.1)
        if self._thread.is_alive():
            self._thread.join(_DROP_SECONDS if self._drop_group() else 0.3)
        return not self._thread.is_alive() or self._lose(self.unmet(), unmet=True)

    def part(self, *, patient: bool = True) -> None:
        """Send all queued data, leave the others as `close` does, and continue alone until `rejoin`.

        They are waited for as long as there. A rank that is silent then is left as soon as it answers.

        Args:
            patient: else only a meeting is given up, at once.
        """
        with self._wake_lock:
            known = self._thread is None or self._over or self._closing is not None or self.state == ALONE
            if known or not (patient or self.state == MEETING):
                return
            self._closing, self.parting = time.monotonic() if patient else -math.inf, True
            self._wake.put(None)
        began = self._closing
        while self.parting and not self._over and not self._unanswered():
            if time.monotonic() - began > self._patience + 1.0:
                break
            with suppress(queue.Empty):
                self._parted.get(timeout=0.1)

    def rejoin(self) -> bool:
        """Meet the others again after `part`; return whether this rank had left them."""
        with self._wake_lock:
            self._rejoins, self._rows_alone = self.parting or self.apart, len(self._rows) if self.apart else 0
            self._wake.put(None)
            return self._rejoins

    @property
    def apart(self) -> bool:
        """Return whether this rank continues alone."""
        return self.world > 1 and self.state == ALONE

    def _unanswered(self) -> bool:
        asked, closing = self._asked, self._closing
        if asked is None or closing is None:
            return False
        return time.monotonic() - max(asked, closing) > _SILENCE_SECONDS

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._meet()
            while not self._over and (self._tick() or self._go_on_alone()):
                self._idle()
                if self._is_to_meet():
                    self._meet()
            with self._wake_lock:
                if self.state == COMPARING:
                    self.state = ENDED
        except ConnectionError as error:  # of ours: a text for people
            self.lose(str(error))
        except _Silence as error:
            self.lose(self._word_of_others() or str(error), silent=True)
        except BaseException as error:  # noqa: BLE001 - whatever kills the exchange must not reach the job
            self.lose(f"{type(error).__name__}: {error}")
        finally:
            if (group := self._group) is not None and self._last_word:
                with suppress(Exception):  # the store may have gone as well
                    group.leave_word(self._last_word)
            if self._over:
                self._drop_group()
            self._group = None  # who left in order says goodbye in order: the others may still read what was sent

    def _meet(self) -> None:
        self._become(tuple(range(self.world)), 0)
        try:
            self._group = self._connect(self._generation, self._members)
        except Exception:
            if self._go_on_alone():  # the process group ends, in whose store they would have met
                return
            raise
        with self._wake_lock:
            if self.state == MEETING:
                self.state = COMPARING
        self.missing = ()

    def _become(self, members: tuple[int, ...], generation: int) -> None:
        """Begin anew with a group; what it knows by then is the same on all of its members."""
        self._members, self._generation = members, generation
        self._capacity, self._fastest = BATCH_ROWS, 0  # that one of the previous tick
        self._inboxes = [bytearray() for _ in range(self.world)]

    def _go_on_alone(self) -> bool:
        """Drop the group that all have left; return False where this rank is to end."""
        with self._wake_lock:
            if not self.parting:
                return False
            self.state = ALONE
        self._group, self.missing = None, ()
        self._become((self.rank,), self._generation + 1)
        self._group = self._connect(self._generation, self._members)
        with self._wake_lock:
            if self.parting:  # it may have been asked to end meanwhile
                self.parting, self._closing = False, None
        self._parted.put(None)
        return True

    @property
    def _holds_back(self) -> bool:
        return self._rejoins and self.apart

    def _is_to_meet(self) -> bool:
        with self._wake_lock:
            if not self._holds_back or self._rows_alone or self._inboxes[self.rank]:
                return False  # others must not get the end of a message of which they have not got the beginning
            self._rejoins, self.state, self._started = False, MEETING, time.monotonic()
        return True

    def lose(self, reason: str, *, silent: bool = False) -> None:
        """End the comparison, from any thread; the first reason counts, and the others get it unless `silent`."""
        self._lose(reason, silent=silent)

    def _lose(self, reason: str, *, silent: bool = False, unmet: bool = False) -> bool:
        """End the comparison, if asked so only where it has not begun; return whether this call did."""
        with self._wake_lock:
            if unmet and self.state != MEETING:
                return False
            known, self._over = self._over, True
            if not known:
                self.reason, self.state = reason, LOST
                self._last_word = "" if silent else f"rank {self.rank} has given up: {reason}"
            self._rows.clear()  # each holds what a step has left behind
            self._forget_words()
            self._wake.put(None)
        if known:
            return False
        with suppress(Exception):  # whoever is told must not end what tells
            self._on_lost(reason)
        return True

    def _drop_group(self) -> bool:
        """Let the others' gathers fail now, so that they learn of it; return whether there was a group."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.close()
        return group is not None

    def _word_of_others(self) -> str | None:
        """Return why another rank gave up, where that is why our gather failed.

        It stands in the job's store, and the process that hosts that may be the one that is stopped: it is asked from a
        thread of its own, which may wait for ever.
        """
        group, found = self._group, list[str | None]()
        if group is None:
            return None

        def read() -> None:
            with suppress(Exception):
                found.append(group.word())

        with suppress(RuntimeError):  # the process may have no more threads
            Thread("ddpdebug-word", read).join(_WORD_SECONDS)
        return found[0] if found else None

    def _idle(self) -> None:
        with suppress(queue.Empty):
            while True:  # what has come so far is seen below
                self._wake.get_nowait()
        with self._wake_lock:
            if self._closing is not None or self._busy or self._everyone_waits:
                seconds = 0.005
            elif self._someone_leaves:
                seconds = 0.02
            elif not self._has_words() and len(self._rows) < BATCH_ROWS:
                seconds = IDLE_SECONDS
            else:
                return
        with suppress(queue.Empty):
            self._wake.get(timeout=seconds)

    def _gather(self, data: bytes) -> list[bytes]:
        group = self._group
        if group is None:
            raise ConnectionError("the side group was closed")
        return self._ask(lambda: group.gather(data))

    def _ask(self, others: Callable[[], T]) -> T:
        self._asked = time.monotonic()
        try:
            answer = others()
        except Exception as error:
            raise _Silence(f"{type(error).__name__}: {error}") from error
        self._asked = None
        return answer

    def _tick(self) -> bool:
        own = self._message()
        gathered = self._gather(own)
        self.ticks += 1
        self.gathered_bytes += len(own) * len(gathered)
        headers = [_HEADER.unpack_from(data) for data in gathered]
        for rank, header in zip(self._members, headers, strict=True):
            _check(rank, header, self._capacity)
        rows: list[tuple[int, bytes]] = []
        for rank, data, header in zip(self._members, gathered, headers, strict=True):
            for i in range(header[3]):
                start = _HEADER.size + i * ROW_BYTES
                rows.append((rank, data[start : start + ROW_BYTES]))
        messages = self._gather_payload([header[5] for header in headers])
        self._capacity = min(max(BATCH_ROWS, *(header[4] for header in headers)), MAX_ROWS)
        flags = [header[1] for header in headers]
        quiet = not any(header[4] or header[5] or header[1] & _BUSY for header in headers)
        self._someone_leaves = any(flag & _LEAVING for flag in flags)
        self._everyone_waits = any(flag & _BUSY for flag in flags)
        last = quiet and not rows and not messages and all(flag & (_LEAVING | _LEFT) for flag in flags)
        left = {rank for rank, flag in zip(self._members, flags, strict=True) if flag & _LEFT}
        members = tuple([rank for rank in self._members if rank not in left])
        progress = max(header[2] for header in headers)
        apart = self._apart([header[2] for header in headers if not header[1] & (_LEAVING | _LEFT)])
        self._busy = self._hand_over(Tick(tuple(rows), tuple(messages), members, progress, apart))
        if last or self.rank in left:
            return False
        if left:
            self._members, self._generation = members, self._generation + 1
            self._group = None
            self._group = self._connect(self._generation, members)
        return True

    def _apart(self, reached: Sequence[int]) -> int:
        """Return how many steps the slowest rank is behind the fastest, by what those that go on have reached.

        No two ranks say it at the same moment, but what a rank says in this tick is later than what any has said in the
        one before: who has not come by now to where another was then, is behind. By one step as well when they take
        each step together.
        """
        behind = self._fastest - min(reached, default=self._fastest)
        self._fastest = max(reached, default=self._fastest)
        return behind if behind > 1 else 0

    def _hand_over(self, tick: Tick) -> bool:
        try:
            return self._on_tick(tick)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for our next gather, whatever this one did
            self._tell("tick", f"{type(error).__name__}: {error}")
            return False

    def _message(self) -> bytes:
        with self._wake_lock:
            taken = self._take_rows()
            waiting, payload = len(self._rows), min(len(self._outbox), _CHUNK)
            if self._holds_back and not self._inboxes[self.rank]:
                payload = 0
            flags = _BUSY if self._busy else 0
            if self._closing is not None and not self._holds_back:
                flags |= _LEAVING
                if self.impatient and not waiting:
                    flags |= _LEFT
        rows = [data for row in taken if (data := self._encoded(row)) is not None]
        head = _HEADER.pack(LAYOUT_VERSION, flags, self.progress, len(rows), waiting, payload)
        return (head + b"".join(rows)).ljust(_HEADER.size + self._capacity * ROW_BYTES, b"\0")

    def _take_rows(self) -> list[bytes | Callable[[], bytes]]:
        """Return the rows of this tick; those of steps since `rejoin` are for all."""
        size = min(self._capacity, self._rows_alone if self._holds_back else len(self._rows))
        self._rows_alone = max(0, self._rows_alone - size)
        return [self._rows.popleft() for _ in range(size)]

    def _encoded(self, row: bytes | Callable[[], bytes]) -> bytes | None:
        try:
            data = row if isinstance(row, bytes) else row()
        except Exception as error:  # noqa: BLE001 - the other ranks judge the step without this row
            self._tell("row", f"{type(error).__name__}: {error}")
            return None
        if len(data) == ROW_BYTES:
            return data
        self._tell("row", f"{len(data)} bytes are no row")
        return None

    def _gather_payload(self, sizes: Sequence[int]) -> list[Said]:
        if not any(sizes):
            return []
        longest = max(sizes)
        with self._wake_lock:
            size = sizes[self._members.index(self.rank)]
            chunk = bytes(self._outbox[:size])
            del self._outbox[:size]
        gathered = self._gather(chunk.ljust(longest, b"\0"))
        self.gathered_bytes += longest * len(gathered)
        messages: list[Said] = []
        for rank, data, length in zip(self._members, gathered, sizes, strict=True):
            self._inboxes[rank] += data[:length]
            messages += [((rank,), message) for message in self._frames(rank)]
        return messages

    def _frames(self, rank: int) -> list[dict[str, Any]]:
        """Take the complete messages out of a rank's stream; one that cannot be read is dropped, alike on all ranks."""
        messages, inbox = [], self._inboxes[rank]
        while len(inbox) >= 4:
            (length,) = struct.unpack_from("<I", inbox)
            if length > MAX_OUTBOX:
                raise RuntimeError(f"rank {rank} sends what is no message")
            if len(inbox) < 4 + length:
                break
            packed = bytes(inbox[4 : 4 + length])
            del inbox[: 4 + length]
            try:
                messages.append(dict(json.loads(zlib.decompressobj().decompress(packed, MAX_MESSAGE))))
            except (zlib.error, ValueError, TypeError, RecursionError) as error:
                if self.rank == self._members[0]:  # all ranks see it
                    self._tell(f"a message of rank {rank}", f"{type(error).__name__}: {error}")
        return messages


def _check(rank: int, header: Sequence[int], capacity: int) -> None:
    layout, _, _, rows, waiting, payload = header
    if layout != LAYOUT_VERSION:
        raise RuntimeError("ranks run different versions of ddpdebug")
    if not (0 <= rows <= capacity and waiting >= 0 and 0 <= payload <= _CHUNK):
        raise RuntimeError(f"rank {rank} sends a header that cannot be true")


class Alone:
    """The group of a world of one: every tick returns its own data."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data."""
        return [data]

    def close(self) -> None:
        """Do nothing."""

    def leave_word(self, text: str) -> None:
        """Do nothing."""

    def word(self) -> str | None:
        """Return None: there is no other rank."""
