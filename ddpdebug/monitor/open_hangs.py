"""The open hangs that one rank knows of: new verdicts, ends of hangs, and their announcement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpdebug.clock import time
from ddpdebug.monitor.seen_ranks import SeenRanks, answers
from ddpdebug.progress.patience import Patience
from ddpdebug.progress.waits import Seen, gravity
from ddpdebug.schema.announcements import Announcement, Hang, HangOver
from ddpdebug.schema.progress import RankProgress, ranks_in
from ddpdebug.schema.run_state import WaitState
from ddpdebug.sinks import Waiting
from ddpdebug.sinks.words import ranks_text

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
#: For so long a rank must not have waited any more, where nothing else shows that its collective has completed.
_OVER_SECONDS = 3.0
#: So many hangs one rank tells of in a run.
_MOST_HANGS = 20


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
        """Whether a rank that waited has gone on; one that only looks up in between has not."""
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


class OpenHangs:
    """The open hangs and the waiting ranks, reported to other ranks, to this rank's diagnosis and to the sinks.

    Args:
        ranks: what this rank knows of all.
        say: sends (kind, fields) to all ranks.
        announce: tells all ranks.
        feed: has this rank's diagnosis hear an announcement now, because the others cannot.
        stand_in: called once as this rank has something to say in the place of rank 0.
        tell: gives the sinks of this rank who waits for whom.
        off: takes what keeps a part from working.
        patience: from when on ranks at work are waited for too long.
        line_seconds: after which people are told of a rank at work that others wait for.
    """

    def __init__(  # noqa: PLR0913 - whom it tells
        self,
        ranks: SeenRanks,
        *,
        say: Callable[..., object],
        announce: Callable[[Announcement], object],
        feed: Callable[[Announcement], object],
        stand_in: Callable[[], object],
        tell: Callable[[Waiting], object],
        off: Callable[[str, str], object],
        patience: Patience,
        line_seconds: float,
    ) -> None:
        self._ranks = ranks
        self._say, self._announce, self._feed = say, announce, feed
        self._stand_in, self._tell, self._off = stand_in, tell, off
        self._patience, self._line_seconds = patience, line_seconds
        self.open: dict[tuple[int, int], _Open] = {}  # (judge, its number) -> one that is open, whoever has told it
        self.lost = False  # the ranks can no longer talk
        self._alone: list[Announcement] = []  # made while the others could not hear it
        self._fed: set[int] = set()  # numbers of these
        self._unheard: list[Hang | HangOver] = []  # sent, and not come back yet with what all have heard
        self._number, self._said_more = 0, False
        self._busy: tuple[int, ...] = ()  # ranks at work of which people have heard
        self.waiting, self._written = Waiting(), (Waiting(), 0.0)  # as it is; as the sinks have it, and since when
        self._speaks = ranks.rank == 0

    # --- who has told of what -----------------------------------------------------------------------------------------

    def hear(self, rank: int, announcement: Hang | HangOver) -> None:
        """Record a hang, or its end, that any rank has announced."""
        if rank == self._ranks.rank:
            self._note_heard(announcement)
        elif isinstance(announcement, HangOver):
            self.open.pop((announcement.judge, announcement.number), None)
        elif announcement.judge != self._ranks.rank:
            began = time.monotonic() - announcement.waited
            looks = {rank: look for rank, (look, _) in self._ranks.looks.items()}
            known = _Open(announcement, began, _waiting(looks))
            self.open.setdefault((announcement.judge, announcement.number), known)

    def _note_heard(self, announcement: Hang | HangOver) -> None:
        """Note that all have heard what this rank has said; where rank 0 has gone, nobody but this one writes it."""
        self._unheard = [one for one in self._unheard if _name(one) != _name(announcement)]
        if isinstance(announcement, HangOver):
            self.open.pop((announcement.judge, announcement.number), None)
        elif 0 not in self._ranks.members:
            self._speak()

    def tell_unheard(self) -> None:
        """Report on this rank what the others can no longer hear."""
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

    def tell_alone(self) -> None:
        """Announce what the others could not hear before, though this rank has reported it."""
        for known in self._alone:
            self._announce(known)
        self._alone.clear()

    def knows(self, announcement: Hang) -> bool:
        """Whether this rank has judged a hang by itself, before the others could hear it."""
        return announcement.judge == self._ranks.rank and announcement.number in self._fed

    # --- what it comes to ---------------------------------------------------------------------------------------------

    def conclude(
        self,
        found: Hang | None,
        now: float,
        *,
        alone: bool,
        begins: bool = True,
        seen: Mapping[int, Seen] | None = None,
    ) -> None:
        """Announce what a verdict changes: a new hang, or the end of one.

        Args:
            alone: the other ranks cannot hear it.
            begins: this rank judges what is new.
            seen: from outside.
        """
        line, busy = self._note_busy(found), None
        if found is not None and found.kind == "busy":
            busy = found
            known = any(one.hang.kind == "busy" for one in self.open.values())
            if found.waited < self._patience.limit and not known:
                found = None
        looks = {rank: look for rank, (look, _) in self._ranks.looks.items()}
        for rank, one in (seen or {}).items():
            if one.progress is not None and answers(one):
                looks[rank] = one.progress
        for key, open_ in list(self.open.items()):
            if self.closes(open_.hang, begins) and open_.hang.kind != "left" and open_.is_over(looks, now):
                del self.open[key]
                self._tell_all(self.over(open_, now), alone=alone)
        new = None if found is None or not begins else self._unsaid(found)
        if new is not None:
            self._begin(new, now, looks, alone=alone)
        self._share(busy, line if begins else "", alone=alone)

    def closes(self, hang: Hang, begins: bool) -> bool:  # noqa: FBT001 - as `conclude` has it
        """Whether this rank announces the end of a hang: of its own ones, and of those of a judge that is gone."""
        gone = hang.judge in self._ranks.left or hang.judge not in self._ranks.members
        return hang.judge == self._ranks.rank or (begins and gone)

    def _unsaid(self, found: Hang) -> Hang | None:
        """Return what of a verdict is new: another rank that has left, or what is graver than all that is open."""
        known = [one.hang for one in self.open.values()]
        if found.kind == "left":
            said = {rank for hang in known if hang.kind == "left" for rank in hang.ranks}
            new = tuple([rank for rank in found.ranks if rank not in said])
            if not new or new == found.ranks:
                return found if new else None
            where = {str(rank): found.where[str(rank)] for rank in new if str(rank) in found.where}
            return replace(found, ranks=new, where=where, phase=None, location=None, blocked_in=None)
        if any(gravity(hang) >= gravity(found) for hang in known):
            return None
        return found

    def _begin(self, found: Hang, now: float, looks: Mapping[int, RankProgress], *, alone: bool) -> None:
        if self._number >= _MOST_HANGS:
            if not self._said_more:
                self._said_more = True
                self._off("hangs", f"there were more than {_MOST_HANGS}: others are not told")
            return
        self._number += 1
        found = replace(self._ranks.with_notes(found), judge=self._ranks.rank, number=self._number)
        self.open[self._ranks.rank, self._number] = _Open(found, now - found.waited, _waiting(looks))
        if alone or (0 in found.ranks and found.kind == "silent"):
            self._speak()
        self._tell_all(found, alone=alone)
        if alone:
            self._fed.add(found.number)

    def _tell_all(self, announcement: Announcement, *, alone: bool) -> None:
        """Announce to all ranks, or as long as they cannot hear it this rank's own diagnosis, and them later."""
        if not alone:
            if isinstance(announcement, Hang | HangOver):
                self._unheard.append(announcement)
            self._announce(announcement)
            return
        if not self.lost:
            self._alone.append(announcement)
        self._feed(announcement)

    @property
    def _gravest(self) -> Hang | None:
        """The hang that is told of who waits now."""
        known = (one.hang for one in self.open.values())
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
        calls = ", ".join(f"{ranks_text(ranks_in(ranks))} in {text}" for ranks, text in found.waits.items())
        who = ", ".join(f"rank {rank} is at work: {text}" for rank, text in found.where.items())
        return f"others wait, for {found.waited:.0f} s so far: {calls}; {who}"

    def take(self, *kinds: str) -> list[_Open]:
        """Remove and return the hangs of these kinds that this rank has announced."""
        keys = [key for key, one in self.open.items() if key[0] == self._ranks.rank and one.hang.kind in kinds]
        return [self.open.pop(key) for key in keys]

    @staticmethod
    def over(one: _Open, now: float) -> HangOver:
        """Return the announcement that a hang is over."""
        return HangOver(number=one.hang.number, judge=one.hang.judge, seconds=round(now - one.began, 1))

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
        before = self.waiting
        # one at work goes from line to line: the first one is enough
        if not line and (new.state, new.ranks, alone) == (before.state, before.ranks, before.alone):
            return
        self.waiting = replace(new, alone=alone, line=line)
        if not alone:
            fields = {"state": int(new.state), "ranks": list(new.ranks)}
            self._say("waiting", **fields, phase=new.phase, location=new.location, line=line)

    def hear_waiting(self, message: Mapping[str, Any]) -> None:
        """Record the judging rank's verdict about waiting ranks."""
        self.waiting = Waiting(
            state=WaitState(message["state"]),
            ranks=tuple([int(each) for each in message["ranks"]]),
            phase=message["phase"],
            location=message["location"],
            line=str(message["line"]),
        )

    def tell_waiting(self, now: float) -> None:
        """Send the sinks a changed state of waiting at once, and a lasting one every few seconds."""
        record = replace(self.waiting, seconds=self._seconds(now))
        before, when = self._written
        new = (record.state, record.ranks, bool(record.seconds)) != (before.state, before.ranks, bool(before.seconds))
        lasts = record.seconds or record.state
        if new or record.line or (lasts and now - when >= _WAITING_SECONDS):
            self._written, self.waiting = (record, now), replace(self.waiting, line="")
            self._tell(record)

    def _seconds(self, now: float) -> dict[int, float]:
        """Return how long each rank has been waiting that does, as far as this one knows."""
        looks = ((rank, *known) for rank, known in self._ranks.looks.items() if rank not in self._ranks.left)
        return {rank: look.same for rank, look, when in looks if look.waiting and now - when < self._ranks.stale}


def _name(announcement: Hang | HangOver) -> tuple[type, int, int]:
    return type(announcement), announcement.judge, announcement.number


def _waiting(looks: Mapping[int, RankProgress]) -> dict[int, RankProgress]:
    return {rank: look for rank, look in looks.items() if look.waiting}
