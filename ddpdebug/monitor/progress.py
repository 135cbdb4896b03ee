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
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdebug.detectors.fail.rules import is_victims
from ddpdebug.disk import Disk
from ddpdebug.exchange.beats import Beats
from ddpdebug.monitor.hang_stop import HangStop
from ddpdebug.progress import black_box, foreign_stack, frames, kernel
from ddpdebug.progress.apart import data_ended, parted
from ddpdebug.progress.asked import Asked
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.waits import IN_ORDER, RUNNING_SECONDS, Seen, judge, mismatch, place_of, where
from ddpdebug.progress.watcher import Watcher
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.announcements import Announcement, End, Failure, Hang, HangOver
from ddpdebug.schema.hangs import is_by_hang
from ddpdebug.schema.progress import DATA_ENDED, Noted, RankProgress
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.wire import from_json, to_json
from ddpdebug.sinks import Waiting
from ddpdebug.sinks.text import ranks_text

#: How long looks are told after somebody has said that it waits, and how often.
_TELL_SECONDS, _EVERY_SECONDS = 3.0, 0.4
#: A look costs a quarter of a millisecond of processor time, two while the rank waits: there are no more than this.
_LOOK_SECONDS = 0.4
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
#: The notes of so many other ranks are compared.
_MOST_COMPARED = 16
#: How often, and for how long, is looked at those that are left once the ranks can no longer talk.
_LOST_SECONDS, _LOST_LIMIT_SECONDS = 0.5, 600.0
#: Of a look that goes through the store: frames, and collectives.
_BEAT_FRAMES, _BEAT_CALLS, _BEAT_BYTES = 8, 8, 64 << 10


class ProgressWatch:
    """The watch of one rank.

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
        self._hang_stop, self._asked = stop, Asked(rank, disk)
        self.box: black_box.BlackBox | None = None
        self._boxless = False
        self._members: tuple[int, ...] = tuple(range(world))
        self._looks: dict[int, tuple[RankProgress, float]] = {}
        self._left: dict[int, tuple[str, float]] = {}
        self._entered: dict[int, Mapping[str, int]] = {}  # final counts of ranks that have told their end
        self._failures: dict[int, Failure] = {}
        self._kernels: dict[int, tuple[kernel.Kernel, float]] = {}
        self._cpu: dict[int, float] = {}  # of a rank when it was found silent
        self._tell_until = self._told = 0.0
        self._hang: tuple[Hang, float] | None = None  # that is open, and when it has begun
        self._alone: list[Hang] = []  # judged while the others could not hear it
        self._fed: set[int] = set()  # numbers of these
        self._number = 0
        self._patience, self._line_seconds = patience or Patience(), line_seconds
        self._busy: tuple[int, ...] = ()  # ranks at work of which people have heard
        self._waiting, self._written = Waiting(), (Waiting(), 0.0)  # as it is; as the sinks have it, and since when
        self._speaks = rank == 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    # --- the ranks talk -----------------------------------------------------------------------------------------------

    def tick(self, members: Iterable[int]) -> None:
        """Look, tell where somebody waits, and judge what all have told."""
        members = tuple(members)
        for rank in set(self._members) - set(members) - self._left.keys():
            self._note_end(rank, "it has left")
        self._members = members
        for hang in self._alone:
            self._announce(hang)  # the others hear of it now; this rank has
        self._alone.clear()
        if time.monotonic() - self._looks.get(self.rank, (None, 0.0))[1] < _LOOK_SECONDS:
            return  # short steps make many ticks
        own, now = self._look()
        if own.waiting:
            self._tell_until = now + _TELL_SECONDS
        if now < self._tell_until and now - self._told >= _EVERY_SECONDS:
            self._told = now
            self._say("progress", look=to_json(own))
        present = [rank for rank in members if rank not in self._left]
        judges = self.rank == min(present, default=self.rank)
        if self._hang is not None or (judges and (self._tell_until > now or self._waiting.state)):
            seen = self._seen(now)
            self._conclude(self._explained(judge(seen), seen), now, alone=False, begins=judges)
        self._tell_waiting(now)
        if self._hang_stop is not None:
            self._hang_stop.tick(own, present, now)

    def hear(self, rank: int, kind: str, message: Mapping[str, Any]) -> None:
        """Take what another rank sees, or says that the waiting comes to."""
        if kind == "progress":
            self._hear_look(rank, message["look"])
        elif rank != self.rank:
            self._hear_waiting(message)

    def _hear_look(self, rank: int, look: Any) -> None:
        known = from_json(RankProgress, look)
        if known is None or known.rank != rank:
            return
        now = time.monotonic()
        self._looks[rank] = known, now
        if known.waiting:
            self._tell_until = now + _TELL_SECONDS

    def hear_of(self, rank: int, announcement: Announcement | None) -> None:
        """Note that a rank has failed, or has left, and why."""
        if isinstance(announcement, Failure):
            self._failures[rank] = announcement
        elif isinstance(announcement, End):
            self._entered[rank] = announcement.entered
            self._note_end(rank, announcement.reason)

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
        now = time.monotonic()
        if own is not None and now - looked < _LOOK_SECONDS:
            return own, now
        own, now = self._watcher.look(), time.monotonic()
        self._looks[self.rank] = own, now
        if self.box is None and not self._boxless:
            self._open_box()
        if self.box is not None:
            self.box.beat({**to_json(own), "build": foreign_stack.BUILD, "thread": self._watcher.address()})
        if (home := self._folder()) is not None:
            self._asked.look(home, own)
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
                found[rank] = Seen(progress=look if now - when < _STALE_SECONDS else None)
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
        _, now = self._look()
        if seconds >= _UNANSWERED_SECONDS:
            self._judge_by_boxes(now, seconds)
        self._tell_waiting(now)

    def _judge_by_boxes(self, now: float, seconds: float = 0.0) -> None:
        """Judge by what is seen without a gather, where no lower rank can.

        Args:
            seconds: for which the ranks have not answered; without them, other hosts are not heard.
        """
        seen, here = self._seen_from_outside(now)
        answering = [rank for rank, one in seen.items() if rank in here and not (one.silent or one.left)]
        speaks = min(answering, default=self.rank) == self.rank
        elsewhere = [rank for rank in self._members if rank not in here]
        if elsewhere and seconds and self._beats is not None:
            self._hear_beats(seen, here, elsewhere, seconds, now, speaks=speaks)
            lower = [rank for rank in elsewhere if rank < self.rank and not (seen[rank].silent or seen[rank].left)]
            speaks &= not lower
        if speaks:
            self._conclude(self._explained(judge(seen), seen), now, alone=True)
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
                seen[0] = replace(seen[0], silent=silent, runs=True)
            return
        for rank in elsewhere:
            if rank in asked and rank in heard:
                one = heard[rank]
                unchanged = now - one.since
                since = unchanged if one.lives or unchanged < _SIGN_SECONDS else seconds
                self._hear_beat(seen, rank, one.value, since)
            elif rank in asked and seconds >= RUNNING_SECONDS and not (seen[rank].kernel or seen[rank].left):
                seen[rank] = Seen(progress=self._looks.get(rank, (None,))[0], silent=seconds, runs=True)

    def _hear_beat(self, seen: dict[int, Seen], rank: int, value: bytes, since: float) -> None:
        """Add what a rank of another host says of itself, and of those beside it."""
        look, near = _read_beat(value)
        if since >= _SIGN_SECONDS:
            if rank not in self._left and not seen[rank].kernel:  # what the rank beside it says is more
                seen[rank] = Seen(progress=look, silent=since, runs=True)
            return
        seen[rank] = Seen(progress=look)
        for other, one in near.items():
            if other in seen and other != self.rank:
                seen[other] = one

    def _seen_from_outside(self, now: float) -> tuple[dict[int, Seen], set[int]]:
        """Return what is known of all ranks by their black boxes and the kernel, and which ranks run on this host."""
        found, here, home = self._seen(now), {self.rank}, self._folder()
        for rank in range(self.world):
            box = None if home is None or rank == self.rank else black_box.read(_box_of(home, rank), notes=False)
            if box is None or not box.here or box.beat < self._began:  # of an earlier attempt
                continue
            here.add(rank)
            found[rank] = self._seen_in(rank, box, now)
        return found, here

    def _seen_in(self, rank: int, box: black_box.Recorded, now: float) -> Seen:
        progress, shown = from_json(RankProgress, box.look), box.kernel()
        if shown is None or shown.is_gone:
            known = None if shown is None else shown.ended_by
            reason = "there is no process any more" if known is None else kernel.ending(known)
            if rank not in self._left:
                if (home := self._folder()) is not None:
                    black_box.keep(_box_of(home, rank), self._disk)
                told = "" if progress is None else progress.ended
                self._left[rank] = f"it has ended: {told}" if told else f"it has gone: {reason}", now
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
        ran = shown.cpu - self._cpu.setdefault(rank, shown.cpu)
        before, when = self._kernels.setdefault(rank, (shown, now))
        runs = shown.moved_since(before, now - when) if now - when >= 1.0 else shown.state == "R"
        if now - when >= 2.0:
            self._kernels[rank] = shown, now
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
            with suppress(Exception):  # nothing of this may reach the job, and there is nobody left to tell
                _, now = self._look()
                self._note_killed(now)
                self._judge_by_boxes(now)
                self._tell_waiting(now)
            self._stop.wait(_LOST_SECONDS)

    def _note_killed(self, now: float) -> None:
        """Say at once that a rank was killed, unless it was asked to end, as all ranks of a cancelled job are."""
        seen, here = self._seen_from_outside(now)
        killed = [
            rank for rank in sorted(here) if "killed by" in seen[rank].left and not seen[rank].left.endswith(_REQUESTS)
        ]
        speaks = min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank
        if killed and speaks:
            self._conclude(self._explained(self._about_left(killed, seen), seen), now, alone=True)

    def finish(self) -> None:
        """Say that an open hang is over, because this rank has come to its end: no look may follow."""
        known = self._hang
        if known is not None and known[0].kind in {"silent", "stuck", "busy"}:
            self._hang = None
            hang, began = known
            over = HangOver(number=hang.number, judge=self.rank, seconds=round(time.monotonic() - began, 1))
            self._announce(over)

    def close(self, reason: str) -> None:
        """End the watch; where this rank ends because another one has gone, say so first."""
        self._stop.set()
        if self._beats is not None:
            self._beats.close()
        if self._thread is not None:
            self._thread.join(0.3)
        if is_victims(reason) and self._hang is None:
            self._note_mismatch()
        if is_victims(reason) and self._hang is None:
            now = time.monotonic()
            seen, here = self._seen_from_outside(now)
            gone = [rank for rank, one in sorted(seen.items()) if one.left and not one.left_by_others]
            if gone and min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank:
                self._conclude(self._about_left(gone, seen), now, alone=True)
        if self._hang is not None and self._hang[0].kind != "left" and not reason.startswith("exception"):
            (known, began), self._hang = self._hang, None  # who comes to its end has not waited for ever
            seconds = round(time.monotonic() - began, 1)
            self._feed(HangOver(number=known.number, judge=self.rank, seconds=seconds))
        self.note_end(reason)
        if self.box is not None:
            self.box.close()

    def note_end(self, reason: str) -> None:
        """Leave in the black box why this rank ends."""
        if self.box is not None:
            last = self._looks[self.rank][0]
            entered = self._watcher.entered() if reason in IN_ORDER else last.entered
            self.box.beat({**to_json(last), "ended": reason, "entered": dict(entered)})

    def _reason_of(self, rank: int) -> str:
        return self._left[rank][0].removeprefix("it has ended: ")

    # --- what the ranks have noted ------------------------------------------------------------------------------------

    def _note_mismatch(self) -> None:
        """Say that calls did not fit together, where this rank ends by that: gloo ends the others' connections."""
        now = time.monotonic()
        seen, here = self._seen_from_outside(now)
        others = (rank for rank in here if not seen[rank].left)
        ended = [one.left for one in seen.values() if one.left]
        if min(others, default=self.rank) == self.rank and not any(map(_explains_itself, ended)):
            found = self._mismatch(seen)
            if found is not None:
                self._conclude(found, now, alone=True)

    def _explained(self, found: Hang | None, seen: Mapping[int, Seen]) -> Hang | None:
        """Return a verdict, or in the place of ranks that have left by calls that did not fit, these."""
        if found is None or found.kind != "left" or any(_explains_itself(seen[rank].left) for rank in found.ranks):
            return found
        if self._hang is not None and self._hang[0].kind == "left":
            return found  # said already
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
        home, found = self._folder(), {self.rank: self._watcher.notes.kept()}
        for rank in islice((rank for rank in ranks if rank != self.rank), _MOST_COMPARED):
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

    def _conclude(self, found: Hang | None, now: float, *, alone: bool, begins: bool = True) -> None:
        """Say what is new, and what is over.

        Args:
            alone: the other ranks cannot hear it.
            begins: this rank judges what is new.
        """
        line, busy = self._note_busy(found), None
        if found is not None and found.kind == "busy":
            busy = found
            if found.waited < self._patience.limit and (self._hang is None or self._hang[0].kind != "busy"):
                found = None
        if self._hang is not None and not self._lasts(self._hang[0], found):
            (known, began), self._hang = self._hang, None
            over = HangOver(number=known.number, judge=self.rank, seconds=round(now - began, 1))
            (self._feed if alone else self._announce)(over)
        if found is not None and self._hang is None and begins:
            self._open(found, now, alone=alone)
        self._share(busy, line if begins else "", alone=alone)

    def _lasts(self, known: Hang, found: Hang | None) -> bool:
        """Tell whether a hang that is open is still there, by what is found now."""
        if known.kind == "left":
            return True
        if found is None:
            return self._still_waits(known)
        return known.ranks == found.ranks or known.kind in {"mismatch", "cycle"}

    def _open(self, found: Hang, now: float, *, alone: bool) -> None:
        self._number += 1
        found = replace(self._with_notes(found), judge=self.rank, number=self._number)
        self._hang = found, now - found.waited
        if (alone or (0 in found.ranks and found.kind == "silent")) and not self._speaks:
            self._speaks = True
            self._stand_in()
        if alone:
            if not self._lost:
                self._alone.append(found)
            self._feed(found)
            self._fed.add(found.number)
        else:
            self._announce(found)

    def _still_waits(self, known: Hang) -> bool:
        """Tell whether the ranks that were waiting have not gone on."""
        looks = [self._looks[rank][0] for rank in range(self.world) if rank in self._looks]
        waiting = [look for look in looks if look.waiting and look.rank not in known.ranks]
        return any(look.step == known.step for look in waiting)

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
        if self._hang is not None:
            about, state = self._hang[0], _STATES[self._hang[0].kind]
        elif busy is not None and busy.waited < self._line_seconds:
            about = None
        if about is None:
            known = Waiting()
        else:
            known = Waiting(state=state, ranks=about.ranks[:_MOST_NAMED], phase=about.phase, location=about.location)
        before = self._waiting
        # one at work goes from line to line: the first one is enough
        if not line and (known.state, known.ranks, alone) == (before.state, before.ranks, before.alone):
            return
        self._waiting = replace(known, alone=alone, line=line)
        if not alone:
            fields = {"state": int(known.state), "ranks": list(known.ranks)}
            self._say("waiting", **fields, phase=known.phase, location=known.location, line=line)

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
        return {rank: look.same for rank, look, when in looks if look.waiting and now - when < _STALE_SECONDS}


def _ranks(text: str) -> list[int]:
    """Return the ranks of a text like "0-3,7"."""
    spans = [part.partition("-") for part in text.split(",")]
    return [rank for low, _, high in spans for rank in range(int(low), int(high or low) + 1)]


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
    return replace(progress, place=at.place, function=at.function, does=at.does, stack=at.stack)


def _box_of(home: Path, rank: int) -> Path:
    return home / RANKS / str(rank) / black_box.NAME
