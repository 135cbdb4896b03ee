"""The watch over hangs of one rank: looks at its own process, hears the others, and says what their waiting comes to.

Three ways in, all in the background thread:

- `tick`: the ranks talk. Who waits says so, the others answer with their own looks, and the lowest of them judges;
- `unanswered`: a gather does not end, because the interpreter of some rank does not run. The ranks of a host read each
  other's black boxes then, and what the kernel shows of a process that gives no sign;
- `lost`: the ranks can no longer talk, because one has gone. A thread goes on in the same way until the job ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdebug.detectors.fail.rules import is_victims
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box, kernel
from ddpdebug.progress.waits import Seen, judge, place_of, where
from ddpdebug.progress.watcher import Watcher
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.announcements import Announcement, End, Failure, Hang, HangOver
from ddpdebug.schema.progress import RankProgress
from ddpdebug.schema.wire import from_json, to_json

#: How often this rank looks at most.
_LOOK_SECONDS = 0.4
#: How long looks are told after somebody has said that it waits, and how often.
_TELL_SECONDS, _EVERY_SECONDS = 3.0, 0.4
#: A look that is older says nothing of now.
_STALE_SECONDS = 4.0
#: How long a gather is waited for before the others' black boxes are read, and how old a sign of life may be.
_UNANSWERED_SECONDS, _SIGN_SECONDS = 2.5, 4.0
#: A rank that is at work is told of where others wait longer than this, and longer than ever before in the run: an
#: evaluation, a checkpoint, or a slow file system beneath the imports takes minutes.
_BUSY_SECONDS, _BUSY_FACTOR = 300.0, 10.0
#: A line for whoever asks what all wait for.
_LINE_SECONDS = 10.0
_LOST_SECONDS = 0.5
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")


class ProgressWatch:
    """The watch of one rank.

    Args:
        folder: returns the run directory, None as long as there is none.
        say: sends (kind, fields) to all ranks.
        announce: tells all ranks.
        feed: has this rank's diagnosis hear an announcement now, because the others cannot.
        stand_in: called once as this rank has something to say in the place of rank 0.
        line: takes a line for people.
        off: takes what keeps a part from working.
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
        line: Callable[[str], object],
        off: Callable[[str, str], object],
    ) -> None:
        self.rank, self.world = rank, world
        self._watcher, self._disk, self._folder = watcher, disk, folder
        self._say, self._announce, self._feed = say, announce, feed
        self._stand_in, self._line, self._off = stand_in, line, off
        self._began = time.monotonic()
        self.box: black_box.BlackBox | None = None
        self._boxless = False
        self._members: tuple[int, ...] = tuple(range(world))
        self._looks: dict[int, tuple[RankProgress, float]] = {}
        self._left: dict[int, tuple[str, float]] = {}
        self._failures: dict[int, Failure] = {}
        self._kernels: dict[int, tuple[kernel.Kernel, float]] = {}
        self._cpu: dict[int, float] = {}  # of a rank when it was found silent
        self._looked = self._tell_until = self._told = 0.0
        self._hang: tuple[Hang, float] | None = None  # that is open, and when it has begun
        self._alone: list[Hang] = []  # judged while the others could not hear it
        self._fed: set[int] = set()  # numbers of these
        self._number = 0
        self._busy: tuple[tuple[int, ...], str] | None = None
        self._longest = 0.0  # wait for ranks at work that came to its end
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
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return  # short steps make many ticks
        own, now = self._look()
        if own.waiting:
            self._tell_until = now + _TELL_SECONDS
        if now < self._tell_until and now - self._told >= _EVERY_SECONDS:
            self._told = now
            self._say("progress", look=to_json(own))
        present = [rank for rank in members if rank not in self._left]
        if present and min(present) == self.rank and (self._tell_until > now or self._hang is not None):
            self._conclude(judge(self._seen(now)), now, alone=False)

    def hear(self, rank: int, look: Any) -> None:
        """Take another rank's look."""
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
            self._note_end(rank, announcement.reason)

    def _note_end(self, rank: int, reason: str) -> None:
        words = reason if reason.startswith("it ") else f"it has ended: {reason}"
        if rank in self._left and self._left[rank][0] != "it has left":
            return
        self._left[rank] = words, self._left.get(rank, ("", time.monotonic()))[1]

    def knows(self, announcement: Hang) -> bool:
        """Tell whether this rank has judged a hang by itself, before the others could hear it."""
        return announcement.judge == self.rank and announcement.number in self._fed

    def _look(self) -> tuple[RankProgress, float]:
        own, now = self._watcher.look(exact=time.monotonic() < self._tell_until), time.monotonic()
        self._looked = now
        self._looks[self.rank] = own, now
        if self.box is None and not self._boxless:
            self._open_box()
        if self.box is not None:
            self.box.beat(to_json(own))
        return own, now

    def _open_box(self) -> None:
        home = self._folder()
        if home is None:
            return
        self._boxless = True
        try:
            self.box = black_box.BlackBox(_box_of(home, self.rank), self._disk)
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
        return Seen(progress=look, left=words, left_at=place, left_for=now - since, left_by_others=by_others)

    # --- a rank does not answer ---------------------------------------------------------------------------------------

    def unanswered(self, seconds: float) -> None:
        """Look while a gather has been waited for so long."""
        _, now = self._look()
        if seconds >= _UNANSWERED_SECONDS:
            self._judge_by_boxes(now)

    def _judge_by_boxes(self, now: float) -> None:
        seen, here = self._seen_from_outside(now)
        answering = [rank for rank, one in seen.items() if rank in here and not (one.silent or one.left)]
        if min(answering, default=self.rank) == self.rank:
            self._conclude(judge(seen), now, alone=True)

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
            told = "" if progress is None else progress.ended
            self._left.setdefault(rank, (f"it has ended: {told}" if told else f"it has gone: {reason}", now))
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
        return Seen(progress=progress, silent=silent, runs=runs, ran=ran, kernel=shown.words())

    # --- the ranks can no longer talk ---------------------------------------------------------------------------------

    def lost(self) -> None:
        """Go on in a thread of its own, because the one that has called is about to end."""
        self._lost = True
        with suppress(RuntimeError):  # the process may have no more threads
            self._thread = threading.Thread(target=self._go_on, name="ddpdebug-progress", daemon=True)
            self._thread.start()

    def _go_on(self) -> None:
        while not self._stop.is_set():
            with suppress(Exception):  # nothing of this may reach the job, and there is nobody left to tell
                _, now = self._look()
                self._note_killed(now)
                self._judge_by_boxes(now)
            self._stop.wait(_LOST_SECONDS)

    def _note_killed(self, now: float) -> None:
        """Say at once that a rank was killed, unless it was asked to end, as all ranks of a cancelled job are."""
        seen, here = self._seen_from_outside(now)
        killed = [
            rank for rank in sorted(here) if "killed by" in seen[rank].left and not seen[rank].left.endswith(_REQUESTS)
        ]
        speaks = min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank
        if killed and speaks:
            self._conclude(self._about_left(killed, seen), now, alone=True)

    def close(self, reason: str) -> None:
        """End the watch; where this rank ends because another one has gone, say so first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        if is_victims(reason) and self._hang is None:
            now = time.monotonic()
            seen, here = self._seen_from_outside(now)
            gone = [rank for rank, one in sorted(seen.items()) if one.left and not one.left_by_others]
            if gone and min((rank for rank in here if not seen[rank].left), default=self.rank) == self.rank:
                self._conclude(self._about_left(gone, seen), now, alone=True)
        if self.box is not None:
            self.box.beat({**to_json(self._looks[self.rank][0]), "ended": reason})
            self.box.close()

    def _reason_of(self, rank: int) -> str:
        return self._left[rank][0].removeprefix("it has ended: ")

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

    def _conclude(self, found: Hang | None, now: float, *, alone: bool) -> None:
        """Say what is new, and what is over."""
        self._note_busy(found)
        if (
            found is not None
            and found.kind == "busy"
            and found.waited < max(_BUSY_SECONDS, _BUSY_FACTOR * self._longest)
        ):
            found = None if self._hang is None or self._hang[0].kind != "busy" else found
        if self._hang is not None:
            known, began = self._hang
            if found is not None and (known.ranks == found.ranks or known.kind in {"left", "mismatch", "cycle"}):
                return
            if known.kind == "left":
                return
            if found is None and self._still_waits(known):
                return
            self._hang = None
            over = HangOver(number=known.number, judge=self.rank, seconds=round(now - began, 1))
            (self._feed if alone else self._announce)(over)
        if found is None:
            return
        self._number += 1
        found = replace(found, judge=self.rank, number=self._number)
        self._hang = found, now - found.waited
        if 0 in found.ranks and (found.kind == "silent" or alone) and not self._speaks:
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

    def _note_busy(self, found: Hang | None) -> None:
        """Say once what ranks that are at work are waited for, and how long that took."""
        if found is None or found.kind != "busy":
            if self._busy is not None and self._hang is None:
                self._busy = None
            return
        if found.waited < _LINE_SECONDS:
            return
        key = found.ranks, found.location or ""
        if self._busy is None or self._busy != key:
            self._busy = key
            who = ", ".join(f"rank {rank} {text}" for rank, text in found.where.items())
            waiting = "; ".join(f"rank {ranks} in {text}" for ranks, text in found.waits.items())
            self._line(f"ranks wait ({waiting}) for others at work: {who}")


def _box_of(home: Path, rank: int) -> Path:
    return home / RANKS / str(rank) / black_box.NAME
