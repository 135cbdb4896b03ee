"""A rank's observation of its own process: the place of its training thread, and how long nothing has moved.

Taken about once a second by the background thread, in about 50 microseconds as long as the training goes on; what
costs more (`/proc`, the newest collectives) is read only once the thread has stood in one place for a second.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ddpdebug.clock import time
from ddpdebug.progress import foreign_stack, frames, kernel
from ddpdebug.progress.waits import WAIT_SECONDS
from ddpdebug.schema.progress import MOST_RECENT, Call, Noted, RankProgress

#: Share of a core below which a process does nothing: its threads that only wake up now and then use less.
_IDLE_SHARE = 0.05
#: Kinds in which a thread may be in a call that ranks make together.
_COLLECTIVE = frozenset({"collective", "backward"})
#: Where DDP's own code is innermost it broadcasts; while its module runs, that is.
_DDP = "/torch/nn/parallel/distributed.py"
_MESSAGES = {"isend": "send", "irecv": "recv"}
#: Kinds of thing that another thread of the process may let go.
_JOINS = frozenset({"lock", "queue"})
#: Times a second that data wakes a thread which reads from the network or a pipe.
_WAKES_PER_SECOND = 2.0
#: Seconds for which a call of storage that does not end counts as movement.
_STORAGE_SECONDS = 60.0
#: A longer time between two looks has been a pause of this process, of which nothing is known: that much counts.
_PAUSE_SECONDS = 2.0
#: Of a call that has not ended, torch's record is read so often, in seconds: its counts may stay when it ends.
_READ_SECONDS = 2.0
#: While collectives come and go, and no messages, their entries, 15 ms for a full recorder, are read as rarely.
_EXACT_SECONDS = 10.0
#: Kinds in which a thread waits for other ranks.
_AMONG_RANKS = frozenset({"collective", "backward", "store"})


class Issued(Protocol):
    """A collective as torch has recorded it."""

    @property
    def group(self) -> str:
        """The name of the process group."""

    @property
    def number(self) -> int:
        """The number among the collectives of the group, from 1."""

    @property
    def operation(self) -> str:
        """The operation, for example "all_reduce"."""

    @property
    def shapes(self) -> tuple[str, ...]:
        """The dtypes and shapes of the inputs, for example "float32 [4, 8]"."""

    @property
    def is_done(self) -> bool:
        """Whether the collective has completed on this rank."""

    @property
    def point_to_point(self) -> bool:
        """Whether this is a message from one rank to another."""


class Recorder(Protocol):
    """Torch's record of collectives."""

    def entered(self) -> Mapping[str, int]:
        """Return what the groups have counted themselves; at any time."""

    def counts(self, *, exact: bool = False) -> Mapping[str, tuple[int, int]] | None:
        """Return (entered, completed) by group; with `exact` exact ones, even if that costs more. Not at any time."""

    def newest(self) -> Sequence[Issued]:
        """Return the newest collectives, oldest first."""

    @property
    def is_counted(self) -> bool:
        """Whether point-to-point messages are among the last counts."""

    @property
    def has_messages(self) -> bool:
        """Whether messages from rank to rank were among the entries: then counts are exact only with the entries."""

    @property
    def meetings(self) -> Collection[str]:
        """Names of torch's functions in which ranks meet in the store."""


class Notes(Protocol):
    """The notes of this process about its calls."""

    def write_to(self, write: Callable[[str], None]) -> None:
        """Set the function that writes notes."""

    def kept(self) -> Sequence[Noted]:
        """Return the newest notes, oldest first."""

    def number(self, group: str, count: int) -> int:
        """Return the number of the newest collective of a group, from the group's count."""


class NoNotes:
    """The placeholder if no notes are taken."""

    def write_to(self, write: Callable[[str], None]) -> None:
        """Write nothing."""

    def kept(self) -> Sequence[Noted]:
        """Return an empty sequence."""
        return ()

    def number(self, group: str, count: int) -> int:
        """Return the count itself."""
        del group
        return count


@dataclass(slots=True)
class _Usage:
    """What the process had used at a moment."""

    time: float
    cpu: float
    others: kernel.Family  # what it has started
    disk: int  # bytes, without those of this thread
    wakes: int  # of the threads that the training thread may wait for
    blocked: frozenset[tuple[int, int]]  # that are in uninterruptible I/O, of these, and what was started
    wanted: Mapping[int, float]  # seconds, by thread, without this one
    thread: kernel.Kernel | None


class Watcher:
    """Observes this process, always from the same thread.

    Args:
        recorder: of torch.
        members: returns the ranks of each group by its name.
        thread: returns the identity of the thread that trains.
        step: returns the step that the rank is heading for.
        workers: returns the process numbers of the loaders' workers.
        notes: what the process has noted of its calls: by what number the ranks compare, and from which line it came.
    """

    def __init__(
        self,
        rank: int,
        recorder: Recorder,
        *,
        members: Callable[[], Mapping[str, tuple[int, ...]]],
        thread: Callable[[], int],
        step: Callable[[], int],
        workers: Callable[[], Sequence[int]],
        notes: Notes | None = None,
    ) -> None:
        self.rank = rank
        self._recorder, self._members, self._thread = recorder, members, thread
        self._step, self._workers, self.notes = step, workers, NoNotes() if notes is None else notes
        self._signature: object = None
        self._counted: dict[str, tuple[int, int]] | None = None  # by the record, since the thread stands where it does
        self._exact = 0.0
        self._since = self._moved = time.monotonic()
        self._looked = self._since
        self._usage: _Usage | None = None
        self._samples = 0  # of what was used, since anything was seen to move
        self._blocked: dict[tuple[int, int], float] = {}  # in uninterruptible I/O, and since when
        self._main, self._patience = 0, WAIT_SECONDS
        self._known: tuple[object, tuple[Call, ...], tuple[Call, ...]] = None, (), ()
        self._read = 0.0

    def look(self) -> RankProgress:
        """Return the present progress of this rank; counts of collectives that do not move are exact."""
        now, ident = time.monotonic(), self._thread()
        stack = frames.take(sys._current_frames().get(ident))  # noqa: SLF001 - documented, and there is no other way
        number, issued = self.notes.number, self._recorder.entered()
        entered = {group: number(group, count) for group, count in issued.items()}
        step = self._step()
        signature = frames.signature(stack), tuple(entered.values()), step
        if signature != self._signature:
            self._signature, self._counted = signature, None
            self._moves(now)
        elif now - self._looked > _PAUSE_SECONDS:  # SIGSTOP, a machine that slept: nobody could have moved
            pause = now - self._looked - _PAUSE_SECONDS
            self._since, self._moved, self._usage, self._samples = self._since + pause, self._moved + pause, None, 0
        self._looked = now
        at = frames.look(stack, self._recorder.meetings)
        counts = self._standing(now, is_safe=all(issued.values()) or _is_together(at))
        same = round(now - self._since, 2)
        waits: tuple[Call, ...] = ()
        recent: tuple[Call, ...] = ()
        kind, shown, workers = at.kind, "", ""
        if same >= WAIT_SECONDS:
            native = _native(ident)
            usage = self._used(now, native, ident, at.kind)
            self._note_movement(usage, at.kind)
            waits, recent = self._waits(counts, at)
            if waits and at.among and not kind:  # of those that torch calls from C++
                kind = "collective"
            shown = "" if usage.thread is None else usage.thread.words()
            workers = _states(self._workers()) if at.kind == "loader" else ""
        return RankProgress(
            rank=self.rank,
            pid=os.getpid(),
            host=kernel.host(),
            time=now,
            step=step,
            phase=at.phase,
            place=at.place,
            function=at.function,
            does=at.does,
            kind=kind,
            same=same,
            still=round(self._still(now), 2),
            waits=waits,
            entered={group: count for group, (count, _) in counts.items()} or entered,
            recent=recent[-MOST_RECENT:] if same >= 2 * WAIT_SECONDS else (),
            workers=workers,
            kernel=shown,
            stack=at.stack,
        )

    def _moves(self, now: float) -> None:
        self._since = self._moved = now
        self._usage, self._samples, self._patience = None, 0, WAIT_SECONDS
        self._blocked.clear()

    def _standing(self, now: float, *, is_safe: bool) -> dict[str, tuple[int, int]]:
        """Return the counts of torch's record, by which a thread that stands still may be seen to move.

        Where a group has issued nothing yet, a thread outside of any collective (it loads something) may issue its
        first one at any moment, and reading the record then ends the process: it is read ever more seldom.
        """
        stood = now - self._since
        if stood < WAIT_SECONDS or (stood < self._patience and not is_safe):
            return self._counted or {}
        self._patience = 2 * stood
        counts, before = self._counts(), self._counted
        if counts == before or self._recorder.has_messages or now - self._exact >= _EXACT_SECONDS:
            counts, self._exact = self._counts(exact=True), now
        self._counted = counts
        if before is not None and counts != before:
            self._moves(now)
        return counts

    def entered(self) -> dict[str, int]:
        """Return the exact number of entered collectives by group, once nothing is trained any more."""
        return {group: entered for group, (entered, _) in self._counts(exact=True).items()}

    def _counts(self, *, exact: bool = False) -> dict[str, tuple[int, int]]:
        """Return how many collectives were entered and have ended, without messages from rank to rank."""
        known = dict(self._recorder.counts(exact=exact) or {})
        if not self._recorder.is_counted:
            return known
        number = self.notes.number
        return {group: (number(group, entered), number(group, ended)) for group, (entered, ended) in known.items()}

    def address(self) -> int:
        """Return the address of the training thread's state, so that its stack can be read from outside."""
        ident, main = self._thread(), threading.main_thread().ident
        if ident != main:  # its number and its memory may be another thread's by now
            return foreign_stack.thread_state(ident)
        self._main = self._main or foreign_stack.thread_state(ident)
        return self._main

    # --- does anything move -------------------------------------------------------------------------------------------

    def _still(self, now: float) -> float:
        """Return for how many seconds nothing has moved: no more than a pause may last until that was measured."""
        still = now - self._moved
        return still if self._samples > 1 else min(still, _PAUSE_SECONDS)

    def _used(self, now: float, native: int, ident: int, kind: str) -> _Usage:
        beside = _beside(ident) if kind in _JOINS else {}
        others, ended = kernel.family({*self._workers(), *kernel.children()}), os.times()
        others = replace(others, cpu=others.cpu + ended.children_user + ended.children_system)
        own = threading.get_native_id()
        thread = kernel.thread(native)
        blocked = {(number, one.wakes) for number, one in beside.items() if one.state == "D"}
        if thread is not None and thread.state == "D":
            blocked.add((native, thread.wakes))
        return _Usage(
            time=now,
            cpu=time.process_time() - time.thread_time(),
            others=others,
            disk=kernel.disk_beside(own),
            wakes=sum(one.wakes for one in beside.values()),
            blocked=frozenset(blocked) if kind in _AMONG_RANKS else others.blocked.union(blocked),
            wanted=kernel.wanted_beside(own),
            thread=thread,
        )

    def _note_movement(self, usage: _Usage, kind: str) -> None:
        """Compare with what was used a while ago: processor time, a place in the queue for it, storage, data."""
        before = self._usage
        self._blocked = {one: self._blocked.get(one, usage.time) for one in usage.blocked}
        if before is None:
            self._usage, self._samples = usage, 1
            return
        seconds = usage.time - before.time
        if seconds < WAIT_SECONDS:
            return
        self._usage, self._samples = usage, self._samples + 1
        moved = any(usage.time - since < _STORAGE_SECONDS for since in self._blocked.values())
        moved |= any(
            wanted - before.wanted.get(number, wanted) > kernel.WANTING_SHARE * seconds
            for number, wanted in usage.wanted.items()
        )
        moved |= usage.cpu - before.cpu > _IDLE_SHARE * seconds
        moved |= usage.disk != before.disk or usage.wakes - before.wakes > _WAKES_PER_SECOND * seconds
        if kind not in _AMONG_RANKS:  # there, what this process has started does not help
            moved |= usage.others.moved_since(before.others, seconds, share=_IDLE_SHARE, wakes=_WAKES_PER_SECOND)
        if usage.thread is not None and before.thread is not None:
            moved |= usage.thread.moved_since(before.thread, seconds, share=_IDLE_SHARE)
            if kind in {"socket", "file"}:
                moved |= usage.thread.wakes - before.thread.wakes > _WAKES_PER_SECOND * seconds
        if moved:
            self._moved, self._samples = usage.time, 1

    # --- what is waited in --------------------------------------------------------------------------------------------

    def _waits(self, counts: Mapping[str, tuple[int, int]], at: frames.At) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        if at.kind in frames.OWN:
            return (), ()
        key, now = (self._signature, tuple(counts.items())), time.monotonic()
        if self._known[0] == key and (not self._known[1] or now - self._read < _READ_SECONDS):
            return self._known[1:]
        self._read = now
        pending = [group for group, (entered, completed) in counts.items() if entered > completed]
        together = _is_together(at)
        newest = self._recorder.newest() if pending or together else []
        members = self._members()
        noted = {(one.call.group, one.call.number): one.call for one in self.notes.kept() if one.call.number}
        calls = [(one, self._call(one, members, noted)) for one in newest]
        recent = tuple([call for _, call in calls])
        waits = [
            call if call.location else replace(call, location=at.place)
            for one, call in calls
            if not one.is_done and (one.group in pending or one.point_to_point)
        ]
        if not newest:  # counts alone: what has completed last is not the newest that has where they end out of order
            waits = [
                Call(group=group, number=counts[group][0], operation=_operation(at), ranks=members.get(group, ()))
                for group in pending
            ]
        if not newest and together:  # torch keeps no record
            recent = tuple([replace(call, ranks=members.get(call.group, ())) for call in noted.values()])
            waits = waits or self._last_call(recent, counts, at)
        if not waits and (at.unrecorded or (at.kind == "collective" and not newest)):
            waits = [
                self._message(at, members) or Call(group="", number=0, operation=_operation(at), location=at.place)
            ]
        self._known = key, tuple(waits), recent
        return self._known[1:]

    @staticmethod
    def _last_call(recent: Sequence[Call], counts: Mapping[str, tuple[int, int]], at: frames.At) -> list[Call]:
        """Return what is waited in by the notes: the last call, if it is this line's and the group has counted it.

        A backward that is noted issues several, of which the newest is waited in.
        """
        entered = {group: count for group, (count, _) in counts.items()}
        last = recent[-1] if recent else None
        if last is None or last.location != at.place or entered.get(last.group, last.number) < last.number:
            return []
        return [replace(last, number=entered.get(last.group, last.number))]

    def _message(self, at: frames.At, members: Mapping[str, tuple[int, ...]]) -> Call | None:
        """Return the message from rank to rank that is waited for: gloo's are in no record but the notes."""
        newest = next((one.call for one in reversed(self.notes.kept()) if one.call.operation in _MESSAGES), None)
        if newest is None or newest.location != at.place:
            return None
        operation = _MESSAGES[newest.operation]
        return replace(newest, operation=operation, point_to_point=True, ranks=members.get(newest.group, ()))

    def _call(self, one: Issued, members: Mapping[str, tuple[int, ...]], noted: Mapping[tuple[str, int], Call]) -> Call:
        known = None if one.point_to_point else noted.get((one.group, one.number))
        return Call(
            group=one.group,
            number=one.number,
            operation=one.operation,
            shapes=one.shapes,
            location=None if known is None else known.location,
            root=None if known is None else known.root,
            ranks=members.get(one.group, ()),
            point_to_point=one.point_to_point,
            is_done=one.is_done,
        )


def _beside(ident: int) -> dict[int, kernel.Kernel]:
    """Return what the kernel shows of the threads that the training thread may wait for: of a pool, or one it joins.

    What only keeps it company (a logger, a heartbeat) is a daemon.
    """
    neither = ident, threading.get_ident()
    others = [t.native_id for t in threading.enumerate() if not t.daemon and t.ident not in neither]
    shown = {native: kernel.thread(native) for native in others if native is not None}
    return {native: one for native, one in shown.items() if one is not None}


def _is_together(at: frames.At) -> bool:
    """Return whether a thread stands in what ranks do together."""
    return at.kind in _COLLECTIVE or (bool(at.stack) and _DDP in at.stack[0])


def _operation(at: frames.At) -> str:
    """Return the function of torch.distributed that the user's line has called."""
    inner = [text for text in at.stack if "/torch/distributed/" in text]
    names = [text.rpartition("(")[2].rstrip(")") for text in inner]
    return next((name for name in reversed(names) if name not in {"wrapper", "__exit__", "__enter__"}), "collective")


def _native(ident: int) -> int:
    if ident == threading.main_thread().ident:
        return os.getpid()  # after a fork Python 3.11 and 3.12 still have the number of before
    return next(
        (t.native_id for t in threading.enumerate() if t.ident == ident and t.native_id is not None), os.getpid()
    )


def _states(pids: Sequence[int]) -> str:
    """Say what a loader's workers do."""
    parts: dict[str, list[int]] = {}
    for pid in pids:
        known = kernel.process(pid)
        words = "has ended" if known is None or known.is_gone else known.words()
        parts.setdefault(words, []).append(pid)
    texts = [
        f"worker{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} {words}" for words, found in parts.items()
    ]
    return "; ".join(texts)
