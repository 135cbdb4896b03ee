"""The hang watch of one rank: observes its own process, hears the other ranks, and judges their waiting.

Three ways in, all in the background thread:

- `tick`: the ranks talk. Who waits says so, the others answer with their own looks, and the lowest of them judges;
- `unanswered`: a gather does not end, because the interpreter of some rank does not run. The ranks of a host read each
  other's black boxes then, and what the kernel shows of a process that gives no sign; of other hosts they hear through
  the job's store, where the lowest rank of each tells of those beside it;
- `lost`: the ranks can no longer talk, because one has gone. A thread goes on in the same way for some minutes.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdebug.clock import time
from ddpdebug.detectors.fail.texts import is_by_loss, is_victims
from ddpdebug.disk import Disk
from ddpdebug.exchange.beats import Beats
from ddpdebug.isolation.background import Thread
from ddpdebug.monitor.hang_stop import HangStop
from ddpdebug.monitor.open_hangs import OpenHangs
from ddpdebug.monitor.seen_ranks import NO_PROCESS, SeenRanks, answers, box_of, short
from ddpdebug.progress import black_box, foreign_stack
from ddpdebug.progress.asked import Asked
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.waits import IN_ORDER, Seen, judge
from ddpdebug.progress.watcher import Watcher
from ddpdebug.schema.announcements import Announcement, Hang, HangOver
from ddpdebug.schema.progress import RankProgress
from ddpdebug.schema.step import are_many
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import Waiting

#: How long looks are told after somebody has said that it waits, and how often.
_TELL_SECONDS, _EVERY_SECONDS = 3.0, 0.4
#: So many ranks can tell so often; more tell less often, to the one that judges, and of all others hear that some wait.
_OFTEN_RANKS = 256
#: A look costs a quarter of a millisecond of processor time, two while the rank waits: there are no more than this.
_LOOK_SECONDS = 0.4
#: How often the run directory, which many ranks may share, is looked at for somebody who asks for stacks.
_ASKED_SECONDS = 2.0
#: How long a gather is waited for before the others' black boxes are read.
_UNANSWERED_SECONDS = 2.5
#: From so many seconds on it is said that a rank at work is waited for, for whoever asks.
_LINE_SECONDS = 10.0
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")
#: For so long the thread that judges is waited for at the end.
_CLOSING_SECONDS = 0.3
#: How long a rank that has lost its connections waits for the process behind one of them to be gone.
_EXIT_SECONDS = 2.0
#: Marks of a black box whose beats say nothing: the thread writes to a sink, or this part is off.
_IN_A_SINK, _IS_OFF = 1, 2
#: How often, and for how long, is looked at those that are left once the ranks can no longer talk.
_LOST_SECONDS, _LOST_LIMIT_SECONDS = 0.5, 600.0


class ProgressWatch:
    """The hang watch of one rank. Once the ranks cannot communicate, two threads may call it: one then does nothing.

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
        self.rank = rank
        self._watcher, self._disk, self._folder = watcher, disk, folder
        self._say, self._announce, self._feed, self._off = say, announce, feed, off
        self._beats, self._hang_stop, self._asked, self._ask_again = beats, stop, Asked(rank, disk), 0.0
        self.box: black_box.BlackBox | None = None
        self._boxless = False
        self._is_one_of_many = are_many(world)
        self._every = _EVERY_SECONDS * max(1.0, world / _OFTEN_RANKS)
        self._tells = max(_TELL_SECONDS, 2.5 * self._every)
        self._ranks = SeenRanks(
            rank,
            world,
            disk=disk,
            folder=folder,
            watcher=watcher,
            beats=beats,
            hosts_store=hosts_store,
            every=self._every,
        )
        self._hangs = OpenHangs(
            self._ranks,
            say=say,
            announce=announce,
            feed=feed,
            stand_in=stand_in,
            tell=tell,
            off=off,
            patience=patience or Patience(),
            line_seconds=line_seconds,
        )
        self._for_exit = _EXIT_SECONDS
        self._tell_until = self._told = self._judged = 0.0
        self._ident, self._is_off, self._parent = 0, False, os.getppid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: Thread | None = None
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
        """Mark in the black box that this thread writes to a sink, which may block: its silence then means nothing."""
        box = self.box if threading.get_ident() == self._ident and not self._is_off else None
        if box is not None:
            box.mark(_IN_A_SINK)
        try:
            yield
        finally:
            if box is not None:
                box.mark(_IS_OFF if self._is_off else 0)

    def went_off(self) -> None:
        """Mark the black box: this watch is off, silence means nothing."""
        self._is_off = True
        if self.box is not None:
            self.box.mark(_IS_OFF)

    # --- the ranks meet -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the black box, by which other processes see this rank."""
        with self._alone_in() as held:
            if held:
                self._ranks.met()
                self._look()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Observe the others in a separate thread while this one is in a call that waits for all ranks."""
        began, over = time.monotonic(), threading.Event()

        def look() -> None:
            while not over.wait(_LOST_SECONDS):
                with suppress(Exception):  # nothing of this may reach the job
                    self.unanswered(time.monotonic() - began)

        with suppress(RuntimeError):  # the process may have no more threads
            Thread("ddpdebug-connecting", look)
        try:
            yield
        finally:
            over.set()

    # --- the ranks talk -----------------------------------------------------------------------------------------------

    def tick(self, members: Iterable[int]) -> None:
        """Observe this rank, announce a wait, and judge the observations of all ranks."""
        with self._alone_in() as held:
            if held and not self._lost:
                self._tick(tuple(members))

    def _tick(self, members: tuple[int, ...]) -> None:
        self._ranks.ticked = time.monotonic()
        if members is not self._ranks.members:
            for rank in set(self._ranks.members) - set(members) - self._ranks.left.keys():
                self._ranks.note_end(rank, "it has left")
            self._ranks.members = members
        self._hangs.tell_alone()
        if time.monotonic() - self._ranks.looks.get(self.rank, (None, 0.0))[1] < _LOOK_SECONDS:
            return  # short steps make many ticks
        own, now = self._look()
        if own.waiting:
            self._tell_until = now + self._tells
        if now < self._tell_until and now - self._told >= self._every:
            self._told = now
            self._say("progress", look=short(own) if self._is_one_of_many else to_json(own))
            if own.waiting and self._is_one_of_many:
                self._say("waits")  # in the same words as the others: looks go to the rank that judges
        present = [rank for rank in members if rank not in self._ranks.left]
        judges = self.rank == min(present, default=self.rank)
        closes = any(self._hangs.closes(one.hang, judges) for one in self._hangs.open.values())
        due = now - self._judged >= self._every - _EVERY_SECONDS
        if due and (closes or (judges and (self._tell_until > now or self._hangs.waiting.state))):
            self._judged = now
            seen = self._ranks.told(now)
            self._conclude(self._explained(judge(seen), seen), now, alone=False, begins=judges)
        self._hangs.tell_waiting(now)
        if self._hang_stop is not None:
            self._hang_stop.tick(own, present, now)

    def hear(self, rank: int, kind: str, message: Mapping[str, Any]) -> None:
        """Handle a message of another rank about its progress, or about the verdict on waiting ranks."""
        if kind == "progress":
            if self._ranks.hear_look(rank, message["look"]):
                self._tell_until = time.monotonic() + self._tells
        elif kind == "waits":
            self._tell_until = time.monotonic() + self._tells
        elif rank != self.rank:
            self._hangs.hear_waiting(message)

    def hear_of(self, rank: int, announcement: Announcement | None) -> None:
        """Record a rank's announcement: failure, end, place, or an open hang."""
        if isinstance(announcement, Hang | HangOver):
            self._hangs.hear(rank, announcement)
        else:
            self._ranks.hear_of(rank, announcement)

    def knows(self, announcement: Hang) -> bool:
        """Whether this rank has judged a hang by itself, before the others could hear it."""
        return self._hangs.knows(announcement)

    def entered(self) -> Mapping[str, int]:
        """Return the number of collectives that this rank has entered, by group."""
        return self._watcher.entered()

    def _look(self) -> tuple[RankProgress, float]:
        own, looked = self._ranks.looks.get(self.rank, (None, 0.0))
        now, self._ident = time.monotonic(), threading.get_ident()
        if own is not None and now - looked < _LOOK_SECONDS:
            return own, now
        own, now = self._watcher.look(), time.monotonic()
        self._ranks.looks[self.rank] = own, now
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
            self.box = black_box.make(box_of(home, self.rank), self._disk)
            self._watcher.notes.write_to(self.box.note)
        except OSError as error:
            self._off("black box", f"what this rank did last will not survive it: {error}")

    # --- a rank does not answer ---------------------------------------------------------------------------------------

    def unanswered(self, seconds: float) -> None:
        """Observe the ranks from outside while a gather has been unanswered for `seconds`."""
        with self._alone_in() as held:
            if not held or self._lost:
                return
            _, now = self._look()
            if seconds >= _UNANSWERED_SECONDS:
                self._judge_by_boxes(now, seconds, *self._ranks.from_outside(now, whole=self._hang_stop is not None))
            self._hangs.tell_waiting(now)

    def _judge_by_boxes(self, now: float, seconds: float, seen: dict[int, Seen], here: set[int]) -> None:
        """Judge by what is seen without a gather, where no lower rank can.

        Args:
            seconds: for which the ranks have not answered; without them, other hosts are not heard.
            here: the ranks of this host.
        """
        speaks = not any(rank < self.rank and answers(seen[rank]) for rank in here)
        elsewhere = [rank for rank in self._ranks.members if rank not in here]
        if elsewhere and seconds and self._beats is not None:
            self._ranks.hear_beats(seen, here, elsewhere, seconds, now, speaks=speaks)
            lower = [rank for rank in elsewhere if rank < self.rank and not (seen[rank].silent or seen[rank].left)]
            speaks &= not lower
        if speaks:
            self._conclude(self._explained(judge(seen), seen), now, alone=True, seen=seen)
        if self._hang_stop is not None:
            others = [one for rank, one in seen.items() if rank in here and rank != self.rank]
            self._hang_stop.alone(self._ranks.looks[self.rank][0], others, now)

    # --- the ranks can no longer talk ---------------------------------------------------------------------------------

    def lost(self) -> None:
        """Continue for some minutes in a separate thread, because the calling one is about to end."""
        self._lost = self._hangs.lost = True
        with suppress(RuntimeError):  # the process may have no more threads
            self._thread = Thread("ddpdebug-progress", self._go_on)

    def _go_on(self) -> None:
        until = time.monotonic() + _LOST_LIMIT_SECONDS
        while not self._stop.is_set() and time.monotonic() < until:
            # nothing of this may reach the job, and there is nobody left to tell
            with suppress(Exception), self._alone_in() as held:
                if held:
                    self._go_round()
            self._stop.wait(_LOST_SECONDS)

    def _go_round(self) -> None:
        self._hangs.tell_unheard()
        _, now = self._look()
        seen, here = self._ranks.from_outside(now, whole=self._hang_stop is not None)
        self._note_killed(seen, here, now)
        self._judge_by_boxes(now, 0.0, seen, here)
        self._hangs.tell_waiting(now)

    def _note_killed(self, seen: dict[int, Seen], here: set[int], now: float) -> None:
        """Say at once that a rank was killed, unless it was asked to end, as all ranks of a cancelled job are."""
        killed = [rank for rank in sorted(here) if "killed by" in seen[rank].left and not _was_asked(seen[rank].left)]
        if killed and min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank:
            self._conclude(self._explained(self._ranks.about_left(killed, seen), seen), now, alone=True, seen=seen)

    def finish(self) -> None:
        """Announce the end of open hangs, because this rank has finished and observes no more."""
        with self._alone_in(_CLOSING_SECONDS) as held:
            for one in self._hangs.take("silent", "stuck", "busy") if held else ():
                self._announce(self._hangs.over(one, time.monotonic()))

    def close(self, reason: str) -> None:
        """End the watch; if this rank ends because another one is gone, report that first."""
        self._stop.set()
        if self._beats is not None:
            self._beats.close()
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)
        with self._alone_in(_CLOSING_SECONDS) as held:
            if held:
                self._hangs.tell_unheard()
                self._judge_end(reason)
        self.note_end(reason)
        if self.box is not None:
            self.box.close()

    def thrown_out(self, reason: str) -> None:
        """Report the rank whose loss ended this rank's script: this process may be killed while it closes."""
        with self._alone_in(_CLOSING_SECONDS) as held:
            if held:
                self._judge_thrown_out(reason, alone=self._lost)

    def _judge_thrown_out(self, reason: str, *, alone: bool) -> None:
        known = any(one.hang.kind != "busy" for one in self._hangs.open.values())
        if known or not is_victims(reason) or self._is_cancelled():
            return
        now = time.monotonic()
        seen, here = self._ranks.from_outside(now)
        # connections close before a process is gone: the kernel may be writing its core
        until = now + self._for_exit if is_by_loss(reason) and here - {self.rank} else now
        self._for_exit = 0.0  # once
        while not any(one.left for one in seen.values()) and time.monotonic() < until:
            time.sleep(0.05)
            now = time.monotonic()
            seen, here = self._ranks.from_outside(now)
        # lower ones that have not come to this themselves yet will; those that have may have known less
        if not any(rank < self.rank and rank not in self._ranks.at_end for rank in here):
            found = self._why_ended(seen)
            if found is None and alone and is_by_loss(reason):
                found = self._by_elimination(seen, here)
            self._conclude(found, now, alone=alone, seen=seen)

    def _judge_end(self, reason: str) -> None:
        self._judge_thrown_out(reason, alone=True)
        if not reason.startswith("exception"):  # who comes to its end has not waited for ever
            for one in self._hangs.take("silent", "stuck", "busy", "cycle", "mismatch"):
                self._feed(self._hangs.over(one, time.monotonic()))

    def _why_ended(self, seen: Mapping[int, Seen]) -> Hang | None:
        """Return why this rank has lost its connection, by what the others have left behind."""
        if not any(one.left and _explains_itself(one.left) for one in seen.values()):
            found = self._ranks.mismatch(seen)  # gloo ends the others' connections then
            if found is not None:
                return found
        gone = [rank for rank, one in sorted(seen.items()) if one.left and not one.left_by_others]
        gone = [rank for rank in gone if not _was_asked(seen[rank].left)]
        named = [rank for rank in gone if not seen[rank].left.endswith(NO_PROCESS)]
        return self._ranks.about_left(named or gone, seen) if gone else None

    def _by_elimination(self, seen: Mapping[int, Seen], here: set[int]) -> Hang | None:
        """Return that the one rank has gone of which nothing is known, where all others have lost their connection."""
        far = [rank for rank in seen if rank not in here and not seen[rank].left]
        if len(far) != 1 or not all(one.left_by_others for rank, one in seen.items() if rank not in {self.rank, *far}):
            return None
        gone = replace(seen[far[0]], left="it has gone, or is out of reach: its connections are closed")
        return self._ranks.about_left(far, {**seen, far[0]: gone})

    def _is_cancelled(self) -> bool:
        """Whether this process was asked to end, or has lost who had started it."""
        asked = {signal.Signals[name] for name in _REQUESTS}
        return bool(signal.sigpending() & asked) or os.getppid() != self._parent

    def note_end(self, reason: str) -> None:
        """Write the reason of this rank's end into the black box."""
        if self.box is not None:
            last = self._ranks.looks[self.rank][0]
            entered = self._watcher.entered() if reason in IN_ORDER else last.entered
            self.box.beat({**to_json(last), "ended": reason, "entered": dict(entered)})

    def _explained(self, found: Hang | None, seen: Mapping[int, Seen]) -> Hang | None:
        """Return a verdict, or in the place of ranks that have left by calls that did not fit, these."""
        if found is None or found.kind != "left":
            return found
        if self._hangs.open and all(seen[rank].left_by_others or _was_asked(seen[rank].left) for rank in found.ranks):
            return None  # they have left because of that
        if any(_explains_itself(seen[rank].left) for rank in found.ranks):
            return found
        if any(one.hang.kind == "left" for one in self._hangs.open.values()):
            return found
        return self._ranks.mismatch(seen) or found

    def _conclude(
        self,
        found: Hang | None,
        now: float,
        *,
        alone: bool,
        begins: bool = True,
        seen: Mapping[int, Seen] | None = None,
    ) -> None:
        """Say what is new, and what is over, unless the run has ended meanwhile."""
        if not (self._stop.is_set() and self._thread is not None and self._thread.is_here()):
            self._hangs.conclude(found, now, alone=alone, begins=begins, seen=seen)


def _was_asked(left: str) -> bool:
    """Whether a rank has left because it was asked to, as all ranks of a cancelled job are."""
    return left.endswith(_REQUESTS) or "KeyboardInterrupt" in left


def _explains_itself(left: str) -> bool:
    """Whether a rank has ended by something else than a call that did not fit: an error of its own, a signal."""
    reason = left.removeprefix("it has ended: ").removeprefix("it has gone: ")
    killed = "killed by" in reason and "SIGABRT" not in reason
    return killed or (reason.startswith("exception") and not is_victims(reason))
