"""The watch over hangs of one rank: looks at its own process, hears the others, and says what their waiting comes to.

Three ways in, all in the background thread:

- `tick`: the ranks talk. Who waits says so, the others answer with their own looks, and the lowest of them judges;
- `unanswered`: a gather does not end, because the interpreter of some rank does not run. The ranks of a host read each
  other's black boxes then, and what the kernel shows of a process that gives no sign; of other hosts they hear through
  the job's store, where the lowest rank of each tells of those beside it;
- `lost`: the ranks can no longer talk, because one has gone. A thread goes on in the same way for some minutes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdebug.detectors.fail.rules import is_by_loss, is_victims
from ddpdebug.disk import Disk
from ddpdebug.exchange.beats import Beats
from ddpdebug.monitor.hang_stop import HangStop
from ddpdebug.progress import black_box, foreign_stack, frames, kernel
from ddpdebug.progress.apart import data_ended, parted
from ddpdebug.progress.asked import Asked
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.waits import IN_ORDER, RUNNING_SECONDS, Seen, gravity, judge, mismatch, place_of, where
from ddpdebug.progress.watcher import Watcher
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.announcements import Announcement, End, Failure, Hang, HangOver, Place
from ddpdebug.schema.hangs import is_by_hang
from ddpdebug.schema.progress import DATA_ENDED, Noted, RankProgress
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import FLAT
from ddpdebug.schema.wire import from_json, to_json
from ddpdebug.sinks import Waiting
from ddpdebug.sinks.text import ranks_text

#: How long looks are told after somebody has said that it waits, and how often.
_TELL_SECONDS, _EVERY_SECONDS = 3.0, 0.4
#: So many ranks can tell so often; more tell less often, to the one that judges, and of all others hear that some wait.
_OFTEN_RANKS = 256
#: A look costs a quarter of a millisecond of processor time, two while the rank waits: there are no more than this.
_LOOK_SECONDS = 0.4
#: How often the run directory, which many ranks may share, is looked at for somebody who asks for stacks.
_ASKED_SECONDS = 2.0
#: A look that is older says nothing of now.
_STALE_SECONDS = 4.0
#: How long a gather is waited for before the others' black boxes are read, and how old a sign of life may be.
_UNANSWERED_SECONDS, _SIGN_SECONDS = 2.5, 4.0
#: From so many seconds on it is said that a rank at work is waited for, for whoever asks.
_LINE_SECONDS = 10.0
#: How often it is told that ranks wait, while they do.
_WAITING_SECONDS = 2.0
#: So many ranks that are waited for are named in what sinks get.
_MOST_NAMED = 8
_STATES = {
    "busy": WaitState.OVERDUE,
    "stuck": WaitState.STUCK,
    "silent": WaitState.SILENT,
    "mismatch": WaitState.APART,
    "cycle": WaitState.APART,
    "left": WaitState.LEFT,
}
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")
#: For so long a rank must not have waited any more, where nothing else shows that its collective has completed.
_OVER_SECONDS = 3.0
#: So many hangs one rank tells of in a run.
_MOST_HANGS = 20
#: A rank of which nobody knows whether it runs on this host is looked for again after so many seconds.
_AGAIN_SECONDS = 2.0
#: For so long the thread that judges is waited for at the end.
_CLOSING_SECONDS = 0.3
#: How long a rank that has lost its connections waits for the process behind one of them to be gone.
_EXIT_SECONDS = 2.0
_NO_PROCESS = "there is no process any more"
#: Marks of a black box whose beats say nothing: the thread writes to a sink, or this part is off.
_IN_A_SINK, _IS_OFF = 1, 2
#: Of very many ranks those of this host are looked for among so many before and after this one.
_NEAR_RANKS = 64
#: The notes of so many other ranks are compared.
_MOST_COMPARED = 16
#: How often, and for how long, is looked at those that are left once the ranks can no longer talk.
_LOST_SECONDS, _LOST_LIMIT_SECONDS = 0.5, 600.0
#: Of a look that goes through the store: frames, and collectives.
_BEAT_FRAMES, _BEAT_CALLS, _BEAT_BYTES = 8, 8, 64 << 10


@dataclass(slots=True, eq=False)
class _Open:
    """A hang that goes on, as far as this rank knows.

    Args:
        waited: rank -> its look when the hang was told, of those that waited.
        free: since when one of them has waited no more.
    """

    hang: Hang
    began: float
    waited: Mapping[int, RankProgress]
    free: float | None = None

    def is_over(self, looks: Mapping[int, RankProgress], now: float) -> bool:
        """Tell whether a rank that waited has gone on; one that only looks up in between has not."""
        free = not self.waited and not any(look.waiting for look in looks.values())
        for rank, before in self.waited.items():
            look = looks.get(rank, before)
            if look.step > before.step:
                return True
            if not _calls(before) & _calls(look):
                if any(look.entered.get(group, 0) > number for group, number in before.entered.items()):
                    return True
                free = True
        self.free = (now if self.free is None else self.free) if free else None
        return self.free is not None and now - self.free >= _OVER_SECONDS


def _calls(look: RankProgress) -> set[tuple[str, int, str]]:
    return {(call.group, call.number, call.operation) for call in look.waits}


class ProgressWatch:
    """The watch of one rank. Two threads of ours may be in it once the ranks can no longer talk: one lets it be then.

    Args:
        folder: returns the run directory, None as long as there is none.
        say: sends (kind, fields) to all ranks.
        announce: tells all ranks.
        feed: has this rank's diagnosis hear an announcement now, because the others cannot.
        stand_in: called once as this rank has something to say in the place of rank 0.
        tell: gives the sinks of this rank who waits for whom.
        off: takes what keeps a part from working.
        patience: from when on ranks at work are waited for too long.
        line_seconds: after which people are told of a rank at work that others wait for.
        beats: by way of the job's store.
        hosts_store: whether that lives in the process of rank 0.
        stop: ends this rank where a hang stands; None where nobody has asked for that.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        rank: int,
        world: int,
        watcher: Watcher,
        *,
        disk: Disk,
        folder: Callable[[], Path | None],
        say: Callable[..., object],
        announce: Callable[[Announcement], object],
        feed: Callable[[Announcement], object],
        stand_in: Callable[[], object],
        tell: Callable[[Waiting], object],
        off: Callable[[str, str], object],
        patience: Patience | None = None,
        line_seconds: float = _LINE_SECONDS,
        beats: Beats | None = None,
        hosts_store: bool = False,
        stop: HangStop | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self._watcher, self._disk, self._folder = watcher, disk, folder
        self._say, self._announce, self._feed = say, announce, feed
        self._stand_in, self._tell, self._off = stand_in, tell, off
        self._beats, self._hosts_store, self._beat = beats, hosts_store, 0
        self._began = time.monotonic()
        self._hang_stop, self._asked, self._ask_again = stop, Asked(rank, disk), 0.0
        self.box: black_box.BlackBox | None = None
        self._boxless = False
        self._members: tuple[int, ...] = tuple(range(world))
        self._looks: dict[int, tuple[RankProgress, float]] = {}
        self._left: dict[int, tuple[str, float]] = {}
        self._entered: dict[int, Mapping[str, int]] = {}  # final counts of ranks that have told their end
        self._failures: dict[int, Failure] = {}
        self._kernels: dict[int, deque[tuple[kernel.Kernel, float]]] = {}
        self._cpu: dict[int, float] = {}  # of a rank when it was found silent
        self._for_exit = _EXIT_SECONDS
        self._tell_until = self._told = self._judged = 0.0
        self._is_one_of_many = world > FLAT
        self._every = _EVERY_SECONDS * max(1.0, world / _OFTEN_RANKS)
        self._tells, self._stale = max(_TELL_SECONDS, 2.5 * self._every), max(_STALE_SECONDS, 2.5 * self._every)
        self._hangs: dict[tuple[int, int], _Open] = {}  # (judge, its number) -> one that is open, whoever has told it
        self._alone: list[Announcement] = []  # made while the others could not hear it
        self._fed: set[int] = set()  # numbers of these
        self._unheard: list[Hang | HangOver] = []  # sent, and not come back yet with what all have heard
        self._number, self._said_more = 0, False
        self._nodes: dict[int, str] = {}  # as the ranks have told
        self._on_host: dict[int, bool] = {}  # rank -> whether it runs on this host, as its black box says
        self._look_again: dict[int, float] = {}
        self._at_end: set[int] = set()  # have come to the end of their watch, or are gone
        self._on_disk: set[int] = set()  # whose black box was brought to where it belongs
        self._ticked, self._ident, self._is_off, self._parent = self._began, 0, False, os.getppid()
        self._lock = threading.Lock()
        self._patience, self._line_seconds = patience or Patience(), line_seconds
        self._busy: tuple[int, ...] = ()  # ranks at work of which people have heard
        self._waiting, self._written = Waiting(), (Waiting(), 0.0)  # as it is; as the sinks have it, and since when
        self._speaks = rank == 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    @contextmanager
    def _alone_in(self, seconds: float = 0.0) -> Iterator[bool]:
        """Say whether no other thread is in here, after waiting for so long at most."""
        held = self._lock.acquire(timeout=seconds)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say in the black box that this thread writes to a sink, which may block: it is not silent for that."""
        box = self.box if threading.get_ident() == self._ident and not self._is_off else None
        if box is not None:
            box.mark(_IN_A_SINK)
        try:
            yield
        finally:
            if box is not None:
                box.mark(_IS_OFF if self._is_off else 0)

    def went_off(self) -> None:
        """Say in the black box that no look follows."""
        self._is_off = True
        if self.box is not None:
            self.box.mark(_IS_OFF)

    # --- the ranks meet -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the black box: whoever else is here sees this rank now."""
        with self._alone_in() as held:
            if held:
                self._look()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Look at the others in a thread of its own while this one is in a call that waits for all."""
        began, over = time.monotonic(), threading.Event()

        def look() -> None:
            while not over.wait(_LOST_SECONDS):
                with suppress(Exception):  # nothing of this may reach the job
                    self.unanswered(time.monotonic() - began)

        with suppress(RuntimeError):  # the process may have no more threads
            threading.Thread(target=look, name="ddpdebug-connecting", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    # --- the ranks talk -----------------------------------------------------------------------------------------------

    def tick(self, members: Iterable[int]) -> None:
        """Look, tell where somebody waits, and judge what all have told."""
        with self._alone_in() as held:
            if held and not self._lost:
                self._tick(tuple(members))

    def _tick(self, members: tuple[int, ...]) -> None:
        self._ticked = time.monotonic()
        if members is not self._members:
            for rank in set(self._members) - set(members) - self._left.keys():
                self._note_end(rank, "it has left")
            self._members = members
        for known in self._alone:
            self._announce(known)  # the others hear of it now; this rank has
        self._alone.clear()
        if time.monotonic() - self._looks.get(self.rank, (None, 0.0))[1] < _LOOK_SECONDS:
            return  # short steps make many ticks
        own, now = self._look()
        if own.waiting:
            self._tell_until = now + self._tells
        if now < self._tell_until and now - self._told >= self._every:
            self._told = now
            self._say("progress", look=_short(own) if self._is_one_of_many else to_json(own))
            if own.waiting and self._is_one_of_many:
                self._say("waits")  # in the same words as the others: looks go to the rank that judges
        present = [rank for rank in members if rank not in self._left]
        judges = self.rank == min(present, default=self.rank)
        closes = any(self._closes(one.hang, judges) for one in self._hangs.values())
        due = now - self._judged >= self._every - _EVERY_SECONDS
        if due and (closes or (judges and (self._tell_until > now or self._waiting.state))):
            self._judged = now
            seen = self._seen(now)
            self._conclude(self._explained(judge(seen), seen), now, alone=False, begins=judges)
        self._tell_waiting(now)
        if self._hang_stop is not None:
            self._hang_stop.tick(own, present, now)

    def hear(self, rank: int, kind: str, message: Mapping[str, Any]) -> None:
        """Take what another rank sees, or says that the waiting comes to."""
        if kind == "progress":
            self._hear_look(rank, message["look"])
        elif kind == "waits":
            self._tell_until = time.monotonic() + self._tells
        elif rank != self.rank:
            self._hear_waiting(message)

    def _hear_look(self, rank: int, look: Any) -> None:
        known = from_json(RankProgress, look)
        if known is None or known.rank != rank:
            return
        now = time.monotonic()
        # others have made it after the tick before: how long it was on its way a gather does not tell
        self._looks[rank] = known, min(now, known.time) if known.host == kernel.host() else self._ticked
        if known.waiting:
            self._tell_until = now + self._tells

    def hear_of(self, rank: int, announcement: Announcement | None) -> None:
        """Note that a rank has failed, or has left, and why; where it runs; and which hangs are open."""
        if isinstance(announcement, Failure):
            self._failures[rank] = announcement
        elif isinstance(announcement, End):
            self._entered[rank] = announcement.entered
            self._note_end(rank, announcement.reason)
        elif isinstance(announcement, Place):
            self._nodes[rank] = announcement.node
        elif isinstance(announcement, Hang | HangOver) and rank == self.rank:
            self._note_heard(announcement)
        elif isinstance(announcement, Hang) and announcement.judge != self.rank:
            began = time.monotonic() - announcement.waited
            known = _Open(announcement, began, _waiting({rank: look for rank, (look, _) in self._looks.items()}))
            self._hangs.setdefault((announcement.judge, announcement.number), known)
        elif isinstance(announcement, HangOver):
            self._hangs.pop((announcement.judge, announcement.number), None)

    def _note_heard(self, announcement: Hang | HangOver) -> None:
        """Note that all have heard what this rank has said; where rank 0 has gone, nobody but this one writes it."""
        self._unheard = [one for one in self._unheard if _name(one) != _name(announcement)]
        if isinstance(announcement, HangOver):
            self._hangs.pop((announcement.judge, announcement.number), None)
        elif 0 not in self._members:
            self._speak()

    def _tell_unheard(self) -> None:
        """Say here what the others can hear no more."""
        unheard, self._unheard = self._unheard, []
        for one in unheard:
            self._speak()
            self._feed(one)
            if isinstance(one, Hang):
                self._fed.add(one.number)

    def _speak(self) -> None:
        """Be the one that people hear of hangs from, in the place of rank 0."""
        if not self._speaks:
            self._speaks = True
            self._stand_in()

    def _note_end(self, rank: int, reason: str) -> None:
        words = reason if reason.startswith("it ") else f"it has ended: {reason}"
        if rank in self._left and self._left[rank][0] != "it has left":
            return
        self._left[rank] = words, self._left.get(rank, ("", time.monotonic()))[1]

    def entered(self) -> Mapping[str, int]:
        """Return how many collectives of each group this rank has entered, for its end."""
        return self._watcher.entered()

    def knows(self, announcement: Hang) -> bool:
        """Tell whether this rank has judged a hang by itself, before the others could hear it."""
        return announcement.judge == self.rank and announcement.number in self._fed

    def _look(self) -> tuple[RankProgress, float]:
        own, looked = self._looks.get(self.rank, (None, 0.0))
        now, self._ident = time.monotonic(), threading.get_ident()
        if own is not None and now - looked < _LOOK_SECONDS:
            return own, now
        own, now = self._watcher.look(exact=time.monotonic() < self._tell_until), time.monotonic()
        self._looks[self.rank] = own, now
        if self.box is None and not self._boxless:
            self._open_box()
        if self.box is not None:
            self.box.beat({**to_json(own), "build": foreign_stack.BUILD, "thread": self._watcher.address()})
        if now >= self._ask_again and (home := self._folder()) is not None:
            self._ask_again = now if now < self._tell_until else now + _ASKED_SECONDS  # while ranks wait at each look
            try:
                self._asked.look(home, own)
            except OSError as error:  # a full disk, say: that is no reason to look no more
                self._ask_again = math.inf
                self._off("stacks", f"this rank answers nobody who asks for its stacks: {error}")
        return own, now

    def _open_box(self) -> None:
        home = self._folder()
        if home is None:
            return
        self._boxless = True
        try:
            self.box = black_box.make(_box_of(home, self.rank), self._disk)
            self._watcher.notes.write_to(self.box.note)
        except OSError as error:
            self._off("black box", f"what this rank did last will not survive it: {error}")

    def _seen(self, now: float) -> dict[int, Seen]:
        """Return what is known of all ranks from what they have told."""
        found = {}
        for rank in range(self.world):
            look, when = self._looks.get(rank, (None, 0.0))
            if rank in self._left:
                found[rank] = self._gone(rank, look, now)
            else:
                found[rank] = Seen(progress=look if now - when < self._stale else None)
        return found

    def _gone(self, rank: int, look: RankProgress | None, now: float) -> Seen:
        words, since = self._left[rank]
        place = self._failures[rank].location if rank in self._failures else None
        by_others = is_victims(self._reason_of(rank))
        entered, gone = self._entered.get(rank), now - since
        return Seen(progress=look, left=words, left_at=place, left_for=gone, left_by_others=by_others, entered=entered)

    # --- a rank does not answer ---------------------------------------------------------------------------------------

    def unanswered(self, seconds: float) -> None:
        """Look while a gather has been waited for so long."""
        with self._alone_in() as held:
            if not held or self._lost:
                return
            _, now = self._look()
            if seconds >= _UNANSWERED_SECONDS:
                self._judge_by_boxes(now, seconds, *self._seen_from_outside(now, whole=self._hang_stop is not None))
            self._tell_waiting(now)

    def _judge_by_boxes(self, now: float, seconds: float, seen: dict[int, Seen], here: set[int]) -> None:
        """Judge by what is seen without a gather, where no lower rank can.

        Args:
            seconds: for which the ranks have not answered; without them, other hosts are not heard.
            here: the ranks of this host.
        """
        speaks = not any(rank < self.rank and _answers(seen[rank]) for rank in here)
        elsewhere = [rank for rank in self._members if rank not in here]
        if elsewhere and seconds and self._beats is not None:
            self._hear_beats(seen, here, elsewhere, seconds, now, speaks=speaks)
            lower = [rank for rank in elsewhere if rank < self.rank and not (seen[rank].silent or seen[rank].left)]
            speaks &= not lower
        if speaks:
            self._conclude(self._explained(judge(seen), seen), now, alone=True, seen=seen)
        if self._hang_stop is not None:
            others = [one for rank, one in seen.items() if rank in here and rank != self.rank]
            self._hang_stop.alone(self._looks[self.rank][0], others, now)

    def _hear_beats(
        self,
        seen: dict[int, Seen],
        here: set[int],
        elsewhere: list[int],
        seconds: float,
        now: float,
        *,
        speaks: bool,
    ) -> None:
        """Tell other hosts of this rank, and add what is heard of theirs."""
        beats = self._beats
        assert beats is not None
        near = {rank: one for rank, one in seen.items() if rank in here and (one.silent or one.left)} if speaks else {}
        heard = beats.heard()
        fresh = [rank for rank, one in heard.items() if one.lives and now - one.since < _SIGN_SECONDS]
        lower = [rank for rank in elsewhere if rank < self.rank]
        if not speaks:
            asked: list[int] = []
        elif any(rank in fresh for rank in lower):
            asked = [min(rank for rank in lower if rank in fresh)]  # that one judges
        else:
            asked = lower if lower and seconds < _SIGN_SECONDS else elsewhere
        self._beat += 1
        beats.keep(_beat_of(self._beat, self._looks[self.rank][0], near), asked)
        if beats.is_over or not speaks:
            return
        if (silent := beats.unanswered()) >= _SIGN_SECONDS:
            if self._hosts_store and 0 in elsewhere:
                seen[0] = replace(seen[0], silent=silent, unknown=True)
            return
        for rank in elsewhere:
            if rank in asked and rank in heard:
                one = heard[rank]
                unchanged = now - one.since
                since = unchanged if one.lives or unchanged < _SIGN_SECONDS else seconds
                self._hear_beat(seen, rank, one.value, since)
            elif rank in asked and seconds >= RUNNING_SECONDS and not (seen[rank].kernel or seen[rank].left):
                seen[rank] = Seen(progress=self._looks.get(rank, (None,))[0], silent=seconds, unknown=True)

    def _hear_beat(self, seen: dict[int, Seen], rank: int, value: bytes, since: float) -> None:
        """Add what a rank of another host says of itself, and of those beside it."""
        look, near = _read_beat(value)
        if since >= _SIGN_SECONDS:
            if rank not in self._left and not seen[rank].kernel:  # what the rank beside it says is more
                seen[rank] = Seen(progress=look, silent=since, unknown=True)
            return
        seen[rank] = Seen(progress=look)
        for other, one in near.items():
            if other in seen and other != self.rank:
                seen[other] = one

    def _seen_from_outside(self, now: float, *, whole: bool = True) -> tuple[dict[int, Seen], set[int]]:
        """Return what is known of all ranks by their black boxes and the kernel, and which ranks run on this host.

        Files of ranks on other hosts are not read twice: a thousand ranks may share one file system.

        Args:
            whole: also those behind a lower rank that answers, and so judges.
        """
        found, here, home = self._seen(now), {self.rank}, self._folder()
        others = (rank for rank in range(self.world) if home is not None and rank != self.rank)
        for rank in others:
            if not self._may_be_here(rank, now):
                continue
            if not whole and any(one < self.rank and _answers(found[one]) for one in here):
                here |= {rank} if self._on_host.get(rank) else set()
                continue
            assert home is not None
            box = black_box.read(_box_of(home, rank), notes=False)
            if box is not None and (not box.here or box.beat >= self._began):
                self._on_host[rank] = box.here
            elif rank not in self._on_host:  # none yet, or one of an earlier attempt
                self._look_again[rank] = now + _AGAIN_SECONDS
            if box is not None and box.here and box.beat >= self._began:
                here.add(rank)
                found[rank] = self._seen_in(rank, box, now)
        return found, here

    def _may_be_here(self, rank: int, now: float) -> bool:
        """Tell whether a rank runs on this host, as far as is known without its files."""
        look, _ = self._looks.get(rank, (None, 0.0))
        if look is not None and look.host:
            return look.host == kernel.host()
        if rank in self._on_host:
            return self._on_host[rank]
        node, own = self._nodes.get(rank), self._nodes.get(self.rank)
        if node is None and self._is_one_of_many and abs(rank - self.rank) > _NEAR_RANKS:
            return False  # a thousand ranks would read a thousand files each
        return (node is None or own is None or node == own) and now >= self._look_again.get(rank, 0.0)

    def _seen_in(self, rank: int, box: black_box.Recorded, now: float) -> Seen:
        progress, shown = from_json(RankProgress, box.look), box.kernel()
        told = "" if progress is None else progress.ended
        if told:  # by its own account, whether its process is still there or not
            self._at_end.add(rank)
            self._note_end(rank, told)
        if shown is None or shown.is_gone:
            self._at_end.add(rank)
            known = None if shown is None else shown.ended_by
            if (home := self._folder()) is not None and rank not in self._on_disk:
                self._on_disk.add(rank)
                black_box.keep(_box_of(home, rank), self._disk)
            reason = _NO_PROCESS if known is None else kernel.ending(known)
            self._left.setdefault(rank, (f"it has gone: {reason}", now))
        if progress is not None and is_by_hang(progress.ended):  # it is no cause of what it has left for
            return Seen(progress=progress, left=f"it has left: {progress.ended}")
        if rank in self._left:
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

    # --- the ranks can no longer talk ---------------------------------------------------------------------------------

    def lost(self) -> None:
        """Go on for some minutes in a thread of its own, because the one that has called is about to end."""
        self._lost = True
        with suppress(RuntimeError):  # the process may have no more threads
            self._thread = threading.Thread(target=self._go_on, name="ddpdebug-progress", daemon=True)
            self._thread.start()

    def _go_on(self) -> None:
        until = time.monotonic() + _LOST_LIMIT_SECONDS
        while not self._stop.is_set() and time.monotonic() < until:
            # nothing of this may reach the job, and there is nobody left to tell
            with suppress(Exception), self._alone_in() as held:
                if held:
                    self._go_round()
            self._stop.wait(_LOST_SECONDS)

    def _go_round(self) -> None:
        self._tell_unheard()
        _, now = self._look()
        seen, here = self._seen_from_outside(now, whole=self._hang_stop is not None)
        self._note_killed(seen, here, now)
        self._judge_by_boxes(now, 0.0, seen, here)
        self._tell_waiting(now)

    def _note_killed(self, seen: dict[int, Seen], here: set[int], now: float) -> None:
        """Say at once that a rank was killed, unless it was asked to end, as all ranks of a cancelled job are."""
        killed = [rank for rank in sorted(here) if "killed by" in seen[rank].left and not _was_asked(seen[rank].left)]
        if killed and min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank:
            self._conclude(self._explained(self._about_left(killed, seen), seen), now, alone=True, seen=seen)

    def finish(self) -> None:
        """Say that an open hang is over, because this rank has come to its end: no look may follow."""
        with self._alone_in(_CLOSING_SECONDS) as held:
            for one in self._own_hangs("silent", "stuck", "busy") if held else ():
                self._announce(self._over(one, time.monotonic()))

    def close(self, reason: str) -> None:
        """End the watch; where this rank ends because another one has gone, say so first."""
        self._stop.set()
        if self._beats is not None:
            self._beats.close()
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)
        with self._alone_in(_CLOSING_SECONDS) as held:
            if held:
                self._tell_unheard()
                self._judge_end(reason)
        self.note_end(reason)
        if self.box is not None:
            self.box.close()

    def thrown_out(self, reason: str) -> None:
        """Say who has gone, where that ended the script of this rank: it may be killed while it takes leave."""
        with self._alone_in(_CLOSING_SECONDS) as held:
            if held:
                self._judge_thrown_out(reason, alone=self._lost)

    def _judge_thrown_out(self, reason: str, *, alone: bool) -> None:
        known = any(one.hang.kind != "busy" for one in self._hangs.values())
        if known or not is_victims(reason) or self._is_cancelled():
            return
        now = time.monotonic()
        seen, here = self._seen_from_outside(now)
        # connections close before a process is gone: the kernel may be writing its core
        until = now + self._for_exit if is_by_loss(reason) and here - {self.rank} else now
        self._for_exit = 0.0  # once
        while not any(one.left for one in seen.values()) and time.monotonic() < until:
            time.sleep(0.05)
            now = time.monotonic()
            seen, here = self._seen_from_outside(now)
        # lower ones that have not come to this themselves yet will; those that have may have known less
        if not any(rank < self.rank and rank not in self._at_end for rank in here):
            found = self._why_ended(seen)
            if found is None and alone and is_by_loss(reason):
                found = self._by_elimination(seen, here)
            self._conclude(found, now, alone=alone, seen=seen)

    def _judge_end(self, reason: str) -> None:
        self._judge_thrown_out(reason, alone=True)
        if not reason.startswith("exception"):  # who comes to its end has not waited for ever
            for one in self._own_hangs("silent", "stuck", "busy", "cycle", "mismatch"):
                self._feed(self._over(one, time.monotonic()))

    def _why_ended(self, seen: Mapping[int, Seen]) -> Hang | None:
        """Return why this rank has lost its connection, by what the others have left behind."""
        if not any(one.left and _explains_itself(one.left) for one in seen.values()):
            found = self._mismatch(seen)  # gloo ends the others' connections then
            if found is not None:
                return found
        gone = [rank for rank, one in sorted(seen.items()) if one.left and not one.left_by_others]
        gone = [rank for rank in gone if not _was_asked(seen[rank].left)]
        named = [rank for rank in gone if not seen[rank].left.endswith(_NO_PROCESS)]
        return self._about_left(named or gone, seen) if gone else None

    def _by_elimination(self, seen: Mapping[int, Seen], here: set[int]) -> Hang | None:
        """Return that the one rank has gone of which nothing is known, where all others have lost their connection."""
        far = [rank for rank in seen if rank not in here and not seen[rank].left]
        if len(far) != 1 or not all(one.left_by_others for rank, one in seen.items() if rank not in {self.rank, *far}):
            return None
        gone = replace(seen[far[0]], left="it has gone, or is out of reach: its connections are closed")
        return self._about_left(far, {**seen, far[0]: gone})

    def _is_cancelled(self) -> bool:
        """Tell whether this process was asked to end, or has lost who had started it."""
        asked = {signal.Signals[name] for name in _REQUESTS}
        return bool(signal.sigpending() & asked) or os.getppid() != self._parent

    def _own_hangs(self, *kinds: str) -> list[_Open]:
        """Take out the hangs of these kinds that this rank has told."""
        keys = [key for key, one in self._hangs.items() if key[0] == self.rank and one.hang.kind in kinds]
        return [self._hangs.pop(key) for key in keys]

    @staticmethod
    def _over(one: _Open, now: float) -> HangOver:
        return HangOver(number=one.hang.number, judge=one.hang.judge, seconds=round(now - one.began, 1))

    def note_end(self, reason: str) -> None:
        """Leave in the black box why this rank ends."""
        if self.box is not None:
            last = self._looks[self.rank][0]
            entered = self._watcher.entered() if reason in IN_ORDER else last.entered
            self.box.beat({**to_json(last), "ended": reason, "entered": dict(entered)})

    def _reason_of(self, rank: int) -> str:
        return self._left[rank][0].removeprefix("it has ended: ")

    # --- what the ranks have noted ------------------------------------------------------------------------------------

    def _explained(self, found: Hang | None, seen: Mapping[int, Seen]) -> Hang | None:
        """Return a verdict, or in the place of ranks that have left by calls that did not fit, these."""
        if found is None or found.kind != "left":
            return found
        if self._hangs and all(seen[rank].left_by_others or _was_asked(seen[rank].left) for rank in found.ranks):
            return None  # they have left because of that
        if any(_explains_itself(seen[rank].left) for rank in found.ranks):
            return found
        if any(one.hang.kind == "left" for one in self._hangs.values()):
            return found
        return self._mismatch(seen) or found

    def _mismatch(self, seen: Mapping[int, Seen]) -> Hang | None:
        """Return what the notes of all ranks say, also of those that are gone: calls that do not fit together."""
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
            box = None if home is None else black_box.read(_box_of(home, rank))
            if box is not None and box.here:
                found[rank] = [noted for note in box.notes if (noted := Noted.read(note.text)) is not None]
        return {rank: notes for rank, notes in found.items() if notes}

    def _with_notes(self, found: Hang) -> Hang:
        """Add where the ranks' calls have parted, and of one that has left whether its data had come to an end."""
        others = (rank for rank in range(self.world) if rank not in found.ranks)
        notes = self._notes((*found.ranks, *others))
        known, where = parted(notes), dict(found.where)
        for rank in found.ranks:
            ended = data_ended(notes.get(rank, ()), DATA_ENDED)
            if found.kind == "left" and ended is not None:
                where[str(rank)] = f"{where.get(str(rank), '')}, {DATA_ENDED} after {ended.batches}".removeprefix(", ")
        told = {} if known is None else {str(rank): noted.words() for rank, noted in known.first.items()}
        return replace(found, parted=told, where=where)

    def _about_left(self, ranks: list[int], seen: Mapping[int, Seen]) -> Hang:
        last = seen[ranks[0]].progress
        return Hang(
            kind="left",
            step=None if last is None else last.step,
            ranks=tuple(ranks),
            phase=None if last is None else last.phase or None,
            location=place_of(seen[ranks[0]]),
            where={str(rank): where(seen[rank]) for rank in ranks},
        )

    # --- what it comes to ---------------------------------------------------------------------------------------------

    def _conclude(
        self,
        found: Hang | None,
        now: float,
        *,
        alone: bool,
        begins: bool = True,
        seen: Mapping[int, Seen] | None = None,
    ) -> None:
        """Say what is new, and what is over.

        Args:
            alone: the other ranks cannot hear it.
            begins: this rank judges what is new.
            seen: from outside.
        """
        if self._stop.is_set() and threading.current_thread() is self._thread:
            return  # the run has ended meanwhile
        line, busy = self._note_busy(found), None
        if found is not None and found.kind == "busy":
            busy = found
            known = any(one.hang.kind == "busy" for one in self._hangs.values())
            if found.waited < self._patience.limit and not known:
                found = None
        looks = {rank: look for rank, (look, _) in self._looks.items()}
        for rank, one in (seen or {}).items():
            if one.progress is not None and _answers(one):
                looks[rank] = one.progress
        for key, open_ in list(self._hangs.items()):
            if self._closes(open_.hang, begins) and open_.hang.kind != "left" and open_.is_over(looks, now):
                del self._hangs[key]
                self._tell_all(self._over(open_, now), alone=alone)
        new = None if found is None or not begins else self._unsaid(found)
        if new is not None:
            self._open(new, now, looks, alone=alone)
        self._share(busy, line if begins else "", alone=alone)

    def _closes(self, hang: Hang, begins: bool) -> bool:  # noqa: FBT001 - as `_conclude` has it
        """Tell whether this rank says that a hang is over: its own, and those of a judge that has gone."""
        gone = hang.judge in self._left or hang.judge not in self._members
        return hang.judge == self.rank or (begins and gone)

    def _unsaid(self, found: Hang) -> Hang | None:
        """Return what of a verdict is new: another rank that has left, or what is graver than all that is open."""
        known = [one.hang for one in self._hangs.values()]
        if found.kind == "left":
            said = {rank for hang in known if hang.kind == "left" for rank in hang.ranks}
            new = tuple(rank for rank in found.ranks if rank not in said)
            if not new or new == found.ranks:
                return found if new else None
            where = {str(rank): found.where[str(rank)] for rank in new if str(rank) in found.where}
            return replace(found, ranks=new, where=where, phase=None, location=None, blocked_in=None)
        if any(gravity(hang) >= gravity(found) for hang in known):
            return None
        return found

    def _open(self, found: Hang, now: float, looks: Mapping[int, RankProgress], *, alone: bool) -> None:
        if self._number >= _MOST_HANGS:
            if not self._said_more:
                self._said_more = True
                self._off("hangs", f"there were more than {_MOST_HANGS}: others are not told")
            return
        self._number += 1
        found = replace(self._with_notes(found), judge=self.rank, number=self._number)
        self._hangs[self.rank, self._number] = _Open(found, now - found.waited, _waiting(looks))
        if alone or (0 in found.ranks and found.kind == "silent"):
            self._speak()
        self._tell_all(found, alone=alone)
        if alone:
            self._fed.add(found.number)

    def _tell_all(self, announcement: Announcement, *, alone: bool) -> None:
        """Tell all ranks, or as long as they cannot hear it this rank's own diagnosis, and them later."""
        if not alone:
            if isinstance(announcement, Hang | HangOver):
                self._unheard.append(announcement)
            self._announce(announcement)
            return
        if not self._lost:
            self._alone.append(announcement)
        self._feed(announcement)

    @property
    def _gravest(self) -> Hang | None:
        """The hang that is told of who waits now."""
        known = (one.hang for one in self._hangs.values())
        return max(known, key=gravity, default=None)

    def _note_busy(self, found: Hang | None) -> str:
        """Count the wait for ranks at work; return a line about it for people, once."""
        if found is None:
            if not self._seconds(time.monotonic()):
                self._patience.ended()
                self._busy = ()
            return ""
        if found.kind != "busy":
            self._patience.broken()
            return ""
        self._patience.waits(found.waited)
        if found.waited < self._line_seconds or {*found.ranks} <= {*self._busy}:
            return ""
        self._busy = found.ranks
        calls = ", ".join(f"{ranks_text(_ranks(ranks))} in {text}" for ranks, text in found.waits.items())
        who = ", ".join(f"rank {rank} is at work: {text}" for rank, text in found.where.items())
        return f"others wait, for {found.waited:.0f} s so far: {calls}; {who}"

    # --- who waits for whom, for the sinks ----------------------------------------------------------------------------

    def _share(self, busy: Hang | None, line: str, *, alone: bool) -> None:
        """Keep what the waiting comes to, and tell the other ranks where that is new."""
        about, state = busy, WaitState.AT_WORK
        if (known := self._gravest) is not None:
            about, state = known, _STATES[known.kind]
        elif busy is not None and busy.waited < self._line_seconds:
            about = None
        if about is None:
            new = Waiting()
        else:
            new = Waiting(state=state, ranks=about.ranks[:_MOST_NAMED], phase=about.phase, location=about.location)
        before = self._waiting
        # one at work goes from line to line: the first one is enough
        if not line and (new.state, new.ranks, alone) == (before.state, before.ranks, before.alone):
            return
        self._waiting = replace(new, alone=alone, line=line)
        if not alone:
            fields = {"state": int(new.state), "ranks": list(new.ranks)}
            self._say("waiting", **fields, phase=new.phase, location=new.location, line=line)

    def _hear_waiting(self, message: Mapping[str, Any]) -> None:
        self._waiting = Waiting(
            state=WaitState(message["state"]),
            ranks=tuple(int(each) for each in message["ranks"]),
            phase=message["phase"],
            location=message["location"],
            line=str(message["line"]),
        )

    def _tell_waiting(self, now: float) -> None:
        """Give the sinks what is new, and every few seconds what lasts."""
        record = replace(self._waiting, seconds=self._seconds(now))
        before, when = self._written
        new = (record.state, record.ranks, bool(record.seconds)) != (before.state, before.ranks, bool(before.seconds))
        lasts = record.seconds or record.state
        if new or record.line or (lasts and now - when >= _WAITING_SECONDS):
            self._written, self._waiting = (record, now), replace(self._waiting, line="")
            self._tell(record)

    def _seconds(self, now: float) -> dict[int, float]:
        """Return how long each rank has been waiting that does, as far as this one knows."""
        looks = ((rank, *known) for rank, known in self._looks.items() if rank not in self._left)
        return {rank: look.same for rank, look, when in looks if look.waiting and now - when < self._stale}


def _ranks(text: str) -> list[int]:
    """Return the ranks of a text like "0-3,7"."""
    spans = [part.partition("-") for part in text.split(",")]
    return [rank for low, _, high in spans for rank in range(int(low), int(high or low) + 1)]


def _name(announcement: Hang | HangOver) -> tuple[type, int, int]:
    return type(announcement), announcement.judge, announcement.number


def _waiting(looks: Mapping[int, RankProgress]) -> dict[int, RankProgress]:
    return {rank: look for rank, look in looks.items() if look.waiting}


def _answers(one: Seen) -> bool:
    """Tell whether a rank is there, and can judge."""
    return one.progress is not None and not (one.silent or one.left)


def _was_asked(left: str) -> bool:
    """Tell whether a rank has left because it was asked to, as all ranks of a cancelled job are."""
    return left.endswith(_REQUESTS) or "KeyboardInterrupt" in left


def _explains_itself(left: str) -> bool:
    """Tell whether a rank has ended by something else than a call that did not fit: an error of its own, a signal."""
    reason = left.removeprefix("it has ended: ").removeprefix("it has gone: ")
    killed = "killed by" in reason and "SIGABRT" not in reason
    return killed or (reason.startswith("exception") and not is_victims(reason))


def _beat_of(number: int, look: RankProgress, near: Mapping[int, Seen]) -> bytes:
    """Return what a rank says of itself and of the silent ones beside it; `number` makes it another each time."""
    told = {
        str(rank): {
            "look": None if one.progress is None else _short(one.progress),
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
    return zlib.compress(json.dumps([number, _short(look), told]).encode(), 1)


def _short(look: RankProgress) -> Any:
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


def _box_of(home: Path, rank: int) -> Path:
    return home / RANKS / str(rank) / black_box.NAME
