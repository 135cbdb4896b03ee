"""The state of all ranks as one rank knows it: from messages, black boxes, the kernel and the job's store.

The ranks of a host read each other's black boxes, and what the kernel shows of a process that gives no sign; of other
hosts they hear through the job's store, where the lowest rank of each tells of those beside it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdebug.clock import time
from ddpdebug.detectors.fail.texts import is_victims
from ddpdebug.disk import Disk
from ddpdebug.exchange.beats import Beats
from ddpdebug.progress import black_box, foreign_stack, frames, kernel
from ddpdebug.progress.apart import data_ended, parted
from ddpdebug.progress.waits import RUNNING_SECONDS, Seen, mismatch, place_of, where
from ddpdebug.progress.watcher import Watcher
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.announcements import Announcement, End, Failure, Hang, Place
from ddpdebug.schema.hangs import is_by_hang
from ddpdebug.schema.progress import DATA_ENDED, Noted, RankProgress
from ddpdebug.schema.step import are_many
from ddpdebug.schema.wire import from_json, to_json

#: A look that is older says nothing of now.
_STALE_SECONDS = 4.0
#: How old a sign of life may be.
_SIGN_SECONDS = 4.0
#: So long after a gather began not to be answered every rank that lives has set its sign in the store.
_SET_SECONDS = 8.0
#: A rank of which nobody knows whether it runs on this host is looked for again after so many seconds.
_AGAIN_SECONDS = 2.0
NO_PROCESS = "there is no process any more"
#: Of very many ranks those of this host are looked for among so many before and after this one.
_NEAR_RANKS = 64
#: The notes of so many other ranks are compared.
_MOST_COMPARED = 16
#: Of a look that goes through the store: frames, and collectives.
_BEAT_FRAMES, _BEAT_CALLS, _BEAT_BYTES = 8, 8, 64 << 10


class SeenRanks:
    """The state of all ranks, itself included, as one rank knows it.

    Args:
        folder: returns the run directory, None as long as there is none.
        watcher: has what this rank has noted.
        beats: by way of the job's store.
        hosts_store: whether that lives in the process of rank 0.
        every: seconds between two looks that a rank tells.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        rank: int,
        world: int,
        *,
        disk: Disk,
        folder: Callable[[], Path | None],
        watcher: Watcher,
        beats: Beats | None,
        hosts_store: bool,
        every: float,
    ) -> None:
        self.rank, self.world, here = rank, world, os.environ.get("LOCAL_WORLD_SIZE", "")
        self._hosts = max(1, world // int(here)) if here.isdecimal() and int(here) else world
        self._is_one_of_many, self.stale = are_many(world), max(_STALE_SECONDS, 2.5 * every)
        self._disk, self._folder, self._watcher = disk, folder, watcher
        self._beats, self._hosts_store, self._beat = beats, hosts_store, 0
        self.began = self.ticked = time.monotonic()
        self.members: tuple[int, ...] = tuple(range(world))
        self.looks: dict[int, tuple[RankProgress, float]] = {}
        self.left: dict[int, tuple[str, float]] = {}
        self.at_end: set[int] = set()  # have come to the end of their watch, or are gone
        self._entered: dict[int, Mapping[str, int]] = {}  # final counts of ranks that have told their end
        self._failures: dict[int, Failure] = {}
        self._kernels: dict[int, deque[tuple[kernel.Kernel, float]]] = {}
        self._cpu: dict[int, float] = {}  # of a rank when it was found silent
        self._nodes: dict[int, str] = {}  # as the ranks have told
        self._on_host: dict[int, bool] = {}  # rank -> whether it runs on this host, as its black box says
        self._look_again: dict[int, float] = {}
        self._on_disk: set[int] = set()  # whose black box was brought to where it belongs

    # --- what they have told ------------------------------------------------------------------------------------------

    def hear_look(self, rank: int, look: Any) -> bool:
        """Record another rank's progress; return whether that rank waits."""
        known = from_json(RankProgress, look)
        if known is None or known.rank != rank:
            return False
        now = time.monotonic()
        # others have made it after the tick before: how long it was on its way a gather does not tell
        self.looks[rank] = known, min(now, known.time) if known.host == kernel.host() else self.ticked
        return known.waiting

    def hear_of(self, rank: int, announcement: Announcement | None) -> None:
        """Record a rank's failure, its end with the reason, or its place."""
        if isinstance(announcement, Failure):
            self._failures[rank] = announcement
        elif isinstance(announcement, End):
            self._entered[rank] = announcement.entered
            self.note_end(rank, announcement.reason)
        elif isinstance(announcement, Place):
            self._nodes[rank] = announcement.node

    def met(self) -> None:
        """Note that all ranks are present: those that had left are back."""
        self.left, self.at_end, self._entered = {}, set(), {}

    def note_end(self, rank: int, reason: str) -> None:
        """Record the end of a rank; a known reason replaces none."""
        words = reason if reason.startswith("it ") else f"it has ended: {reason}"
        if rank in self.left and self.left[rank][0] != "it has left":
            return
        self.left[rank] = words, self.left.get(rank, ("", time.monotonic()))[1]

    def told(self, now: float) -> dict[int, Seen]:
        """Return the state of all ranks from their own messages."""
        found = {}
        for rank in range(self.world):
            look, when = self.looks.get(rank, (None, 0.0))
            if rank in self.left:
                found[rank] = self._gone(rank, look, now)
            else:
                found[rank] = Seen(progress=look if now - when < self.stale else None)
        return found

    def _gone(self, rank: int, look: RankProgress | None, now: float) -> Seen:
        words, since = self.left[rank]
        place = self._failures[rank].location if rank in self._failures else None
        by_others = is_victims(words.removeprefix("it has ended: "))
        entered, gone = self._entered.get(rank), now - since
        return Seen(progress=look, left=words, left_at=place, left_for=gone, left_by_others=by_others, entered=entered)

    # --- what is seen of those that do not answer ---------------------------------------------------------------------

    def from_outside(self, now: float, *, whole: bool = True) -> tuple[dict[int, Seen], set[int]]:
        """Return the state of all ranks by black boxes and kernel, and the ranks on this host.

        Files of ranks on other hosts are not read twice: a thousand ranks may share one file system.

        Args:
            whole: also those behind a lower rank that answers, and so judges.
        """
        found, here, home = self.told(now), {self.rank}, self._folder()
        others = (rank for rank in range(self.world) if home is not None and rank != self.rank)
        for rank in others:
            if not self._may_be_here(rank, now):
                continue
            if not whole and any(one < self.rank and answers(found[one]) for one in here):
                here |= {rank} if self._on_host.get(rank) else set()
                continue
            assert home is not None
            box = black_box.read(box_of(home, rank), notes=False)
            if box is not None and (not box.here or box.beat >= self.began):
                self._on_host[rank] = box.here
            elif rank not in self._on_host:  # none yet, or one of an earlier attempt
                self._look_again[rank] = now + _AGAIN_SECONDS
            if box is not None and box.here and box.beat >= self.began:
                here.add(rank)
                found[rank] = self._seen_in(rank, box, now)
        return found, here

    def _may_be_here(self, rank: int, now: float) -> bool:
        """Whether a rank runs on this host, as far as is known without its files."""
        look, _ = self.looks.get(rank, (None, 0.0))
        if look is not None and look.host:
            return look.host == kernel.host()
        if rank in self._on_host:
            return self._on_host[rank]
        node, own = self._nodes.get(rank), self._nodes.get(self.rank)
        far = abs(rank - self.rank) > _NEAR_RANKS and (rank - self.rank) % self._hosts  # dealt out host by host
        if node is None and self._is_one_of_many and far:
            return False  # a thousand ranks would read a thousand files each
        return (node is None or own is None or node == own) and now >= self._look_again.get(rank, 0.0)

    def _seen_in(self, rank: int, box: black_box.Recorded, now: float) -> Seen:
        progress, shown = from_json(RankProgress, box.look), box.kernel()
        told = "" if progress is None else progress.ended
        if told:  # by its own account, whether its process is still there or not
            self.at_end.add(rank)
            self.note_end(rank, told)
        if shown is None or shown.is_gone:
            self.at_end.add(rank)
            known = None if shown is None else shown.ended_by
            if (home := self._folder()) is not None and rank not in self._on_disk:
                self._on_disk.add(rank)
                black_box.keep(box_of(home, rank), self._disk)
            reason = NO_PROCESS if known is None else kernel.ending(known)
            self.left.setdefault(rank, (f"it has gone: {reason}", now))
        if progress is not None and is_by_hang(progress.ended):  # it is no cause of what it has left for
            return Seen(progress=progress, left=f"it has left: {progress.ended}")
        if rank in self.left:
            return self._gone(rank, progress, now)
        silent = now - box.beat
        if silent < _SIGN_SECONDS:
            self._kernels.pop(rank, None)
            self._cpu.pop(rank, None)
            return Seen(progress=progress)
        assert shown is not None
        if box.mark and not shown.is_stopped:
            return Seen()  # its interpreter may well run
        ran = shown.cpu - self._cpu.setdefault(rank, shown.cpu)
        looks = self._kernels.setdefault(rank, deque())
        looks.append((shown, now))
        while now - looks[1 % len(looks)][1] >= 1.0:
            looks.popleft()
        before, when = looks[0]  # the newest that is a second old
        runs = shown.moved_since(before, now - when) if now - when >= 1.0 else shown.state == "R"
        found = Seen(progress=progress, silent=silent, runs=runs, ran=ran, kernel=shown.words())
        place = _place_now(box, shown)
        return found if place is None or progress is None else replace(found, progress=_at(progress, place), now=True)

    def hear_beats(
        self,
        seen: dict[int, Seen],
        here: set[int],
        elsewhere: list[int],
        seconds: float,
        now: float,
        *,
        speaks: bool,
    ) -> None:
        """Publish this rank's state to other hosts, and add theirs to `seen`."""
        beats = self._beats
        assert beats is not None
        near = {rank: one for rank, one in seen.items() if rank in here and (one.silent or one.left)} if speaks else {}
        heard = beats.heard()
        fresh = [rank for rank, one in heard.items() if one.lives and one.unchanged(now) < _SIGN_SECONDS]
        lower = [rank for rank in elsewhere if rank < self.rank]
        if not speaks:
            asked: list[int] = []
        elif any(rank in fresh for rank in lower):
            asked = [min(rank for rank in lower if rank in fresh)]  # that one judges
        else:
            asked = lower if lower and seconds < _SIGN_SECONDS else elsewhere
        self._beat += 1
        beats.keep(_beat_of(self._beat, self.looks[self.rank][0], near), asked)
        if beats.is_over or not speaks:
            return
        if (silent := beats.unanswered()) >= _SIGN_SECONDS:
            if self._hosts_store and 0 in elsewhere:
                seen[0] = replace(seen[0], silent=silent, unknown=True)
            return
        missed, began = beats.missed(), now - seconds  # of very many ranks each one is looked for only now and then
        for rank in elsewhere:
            if rank in asked and rank in heard:
                one = heard[rank]
                unchanged = one.unchanged(now)
                since = unchanged if one.lives or unchanged < _SIGN_SECONDS else seconds
                self._hear_beat(seen, rank, one.value, since)
            elif seconds < RUNNING_SECONDS or rank not in asked or missed.get(rank, 0.0) - began < _SET_SECONDS:
                continue
            elif not (seen[rank].kernel or seen[rank].left):
                seen[rank] = Seen(progress=self.looks.get(rank, (None,))[0], silent=seconds, unknown=True)

    def _hear_beat(self, seen: dict[int, Seen], rank: int, value: bytes, since: float) -> None:
        """Add what a rank of another host says of itself, and of those beside it."""
        look, near = _read_beat(value)
        if since >= _SIGN_SECONDS:
            if rank not in self.left and not seen[rank].kernel:  # what the rank beside it says is more
                seen[rank] = Seen(progress=look, silent=since, unknown=True)
            return
        seen[rank] = Seen(progress=look)
        for other, one in near.items():
            if other in seen and other != self.rank:
                seen[other] = one

    # --- what they have noted -----------------------------------------------------------------------------------------

    def mismatch(self, seen: Mapping[int, Seen]) -> Hang | None:
        """Return a hang because of collectives that do not match, from the notes of all ranks, ended ones included."""
        known = parted(self._notes(seen))
        if known is None or not known.clash:
            return None
        found = mismatch({rank: noted.call for rank, noted in known.clash.items()}, seen)
        return replace(found, step=min(noted.step for noted in known.clash.values()), phase="collective")

    def _notes(self, ranks: Iterable[int]) -> dict[int, Sequence[Noted]]:
        """Return what ranks of this host have noted, of so many of them."""
        home, found, now = self._folder(), {self.rank: self._watcher.notes.kept()}, time.monotonic()
        others = (rank for rank in ranks if rank != self.rank and self._may_be_here(rank, now))
        for rank in islice(others, _MOST_COMPARED):
            box = None if home is None else black_box.read(box_of(home, rank))
            if box is not None and box.here:
                found[rank] = [noted for note in box.notes if (noted := Noted.read(note.text)) is not None]
        return {rank: notes for rank, notes in found.items() if notes}

    def with_notes(self, found: Hang) -> Hang:
        """Add the point at which the ranks' collectives diverge, and whether a rank that left had no data any more."""
        others = (rank for rank in range(self.world) if rank not in found.ranks)
        notes = self._notes((*found.ranks, *others))
        known, where = parted(notes), dict(found.where)
        for rank in found.ranks:
            ended = data_ended(notes.get(rank, ()), DATA_ENDED)
            if found.kind == "left" and ended is not None:
                where[str(rank)] = f"{where.get(str(rank), '')}, {DATA_ENDED} after {ended.batches}".removeprefix(", ")
        told = {} if known is None else {str(rank): noted.words() for rank, noted in known.first.items()}
        return replace(found, parted=told, where=where)

    def about_left(self, ranks: list[int], seen: Mapping[int, Seen]) -> Hang:
        """Return the hang that consists in these ranks having left."""
        last = seen[ranks[0]].progress
        return Hang(
            kind="left",
            step=None if last is None else last.step,
            ranks=tuple(ranks),
            phase=None if last is None else last.phase or None,
            location=place_of(seen[ranks[0]]),
            where={str(rank): where(seen[rank]) for rank in ranks},
        )


def answers(one: Seen) -> bool:
    """Whether a rank responds, and so can judge."""
    return one.progress is not None and not (one.silent or one.left)


def _beat_of(number: int, look: RankProgress, near: Mapping[int, Seen]) -> bytes:
    """Return what a rank says of itself and of the silent ones beside it; `number` makes it another each time."""
    told = {
        str(rank): {
            "look": None if one.progress is None else short(one.progress),
            "kernel": one.kernel,
            "silent": one.silent,
            "runs": one.runs,
            "ran": one.ran,
            "left": one.left,
            "left_for": one.left_for,
            "now": one.now,
        }
        for rank, one in near.items()
    }
    return zlib.compress(json.dumps([number, short(look), told]).encode(), 1)


def short(look: RankProgress) -> Any:
    """Return a rank's progress as it is sent, with its first stack frames and its last collectives only."""
    return to_json(replace(look, stack=look.stack[:_BEAT_FRAMES], recent=look.recent[-_BEAT_CALLS:]))


def _read_beat(value: bytes) -> tuple[RankProgress | None, dict[int, Seen]]:
    """Return what a rank says of itself and of those beside it; nothing of what cannot be read."""
    near: dict[int, Seen] = {}
    try:
        _, look, told = json.loads(zlib.decompressobj().decompress(value, _BEAT_BYTES))
        for rank, one in told.items():
            near[int(rank)] = Seen(
                progress=from_json(RankProgress, one["look"]),
                silent=float(one["silent"]),
                runs=bool(one["runs"]),
                ran=float(one["ran"]),
                kernel=str(one["kernel"]),
                now=bool(one["now"]),
                left=str(one["left"]),
                left_for=float(one["left_for"]),
            )
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, {}
    return from_json(RankProgress, look), near


def _place_now(box: black_box.Recorded, shown: kernel.Kernel) -> frames.At | None:
    """Return where the thread of a silent process is, read from its memory; None where that cannot be had."""
    if shown.state == "D" or box.look.get("build") != foreign_stack.BUILD:
        return None  # to read the memory of one in uninterruptible I/O may wait for the same
    state = box.look.get("thread")
    places = foreign_stack.read(box.pid, state) if isinstance(state, int) else []
    return frames.of_places(places) if places else None


def _at(progress: RankProgress, at: frames.At) -> RankProgress:
    return replace(progress, place=at.place, function=at.function, does=at.does, kind=at.kind, stack=at.stack)


def box_of(home: Path, rank: int) -> Path:
    """Return the path of a rank's black box."""
    return home / RANKS / str(rank) / black_box.NAME
