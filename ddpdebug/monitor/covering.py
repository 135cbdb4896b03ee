"""Keeps the coverage of a run up to date, and prints in its first minute what is not compared. Torch-free.

A thread of its own looks every few seconds: the exchange's thread may be the one that waits for somebody who does not
come. The training thread only counts.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ddpdebug.clock import time
from ddpdebug.isolation.background import Thread
from ddpdebug.printing import say
from ddpdebug.schema.announcements import RankCoverage
from ddpdebug.schema.coverage import Coverage, Gap, Tally, Weight
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Covered, Record
from ddpdebug.sinks.words import ranks_text

#: A run is asked what it compares so long after its first step (after the first backward where no step comes: some
#: add up gradients for long), or so long after its ranks should have met.
STEP_SECONDS, BACKWARD_SECONDS, MEET_SECONDS = 25.0, 50.0, 50.0
_LOOK_SECONDS, _LOOK_SECONDS_LATER, _EARLY_SECONDS = 5.0, 15.0, 90.0
#: What is known is written down at least so often.
_KEEP_SECONDS = 60.0
#: Ranks that give no sign for so long while this one trains on are not compared.
_SILENT_SECONDS = 60.0
#: What is said besides: of a part that fails there is a line already, when it fails.
_SAID = frozenset({("parameters", Weight.PART), ("optimizer", Weight.NOTE)})
_NOT_REACHED = "the other ranks were not reached (port closed? other ranks not started with ddpdebug?)"
_NO_CONNECTION = "the ranks found each other but cannot connect (a firewall between them?)"


class Covering:
    """The coverage of one rank's run.

    Args:
        account: returns this rank's own account; called in the background, only reads.
        write: hands a record to the sinks, which may not be open yet.
        announce: tells all ranks this rank's account.
        quiet: print nothing.
        clock: seconds.
    """

    def __init__(
        self,
        account: Callable[[], RankCoverage],
        write: Callable[[Record], None],
        announce: Callable[[RankCoverage], None],
        *,
        quiet: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account, self._write, self._announce = account, write, announce
        self._quiet, self._clock = quiet, clock
        self.off: dict[str, str] = {}  # parts of this rank that are off
        self._rank, self._world, self._tally = 0, 1, Tally(1)
        self._others: dict[int, RankCoverage] = {}
        self._phase, self._lost = "", ""  # "", "meeting", "connecting", "met"
        self._store: Any = None  # the job's, `torch.distributed.Store`
        self._claim: int | None = None  # who of this node's ranks looked for the others first, from 1
        self._prefix = ""
        self.missing: tuple[int, ...] = ()  # ranks that have not come to the meeting, as far as this one knows
        self._begun = self._stepped = self._backward = self._ticked = self._kept = 0.0
        self._steps_at_tick = 0
        self._certain = self._ended = False
        self._sharding_said = False
        self._said: dict[tuple[str, Weight], Gap] = {}
        self._shown: tuple[Any, ...] = ()
        self._told: RankCoverage | None = None
        self._sinks_open = False
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread: Thread | None = None

    # --- what happens -------------------------------------------------------------------------------------------------

    def begin(self, rank: int, world: int, store: Any = None, prefix: str = "") -> None:
        """Set this rank and the world size; from now on the ranks are expected to meet."""
        self._rank, self._world, self._tally = rank, world, Tally(world)
        self._store, self._prefix = store, f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._begun = self._clock()
        if world > 1:
            self._phase = "meeting" if store is not None else "none"

    def opened(self) -> None:
        """Note that the sinks are open."""
        self._sinks_open = True

    def let_store_go(self) -> None:
        """Drop the reference to the job's store, which ends with its process group."""
        self._store = None

    def meeting(self) -> None:
        """Note that this rank waits for the others at the meeting; called in the exchange's thread."""
        if self._rank == 0 and self._store is not None:
            self._store.set(f"{self._prefix}/node", platform.node())
        elif self._store is not None and self._claim is None:  # later the store may be gone
            self._claim = self._store.add(f"{self._prefix}/speaker/{platform.node()}", 1)

    def connecting(self) -> None:
        """Note that all ranks have come to the meeting and now connect."""
        if self._phase == "meeting":
            self._phase = "connecting"
        key = f"{self._prefix}/node"
        known = self._store is not None and self._rank != 0 and self._store.check([key])
        if known and bytes(self._store.get(key)).decode() == platform.node():
            self._claim = 0  # rank 0 has a terminal of its own, and speaks for its node

    def ticked(self, ranks: int) -> None:
        """Note the number of ranks in a tick; a single one has met nobody."""
        self._phase = "met" if ranks > 1 and self._phase in {"meeting", "connecting"} else self._phase
        self._ticked = self._clock()

    def lost(self, reason: str) -> None:
        """Note that the ranks can no longer be compared."""
        self._lost = reason

    def judged(self, step: Step) -> None:
        """Count a step of all ranks."""
        self._tally.add(step)
        if not self._sharding_said and step.any(Flag.SHARDED):
            self.look()

    def hear(self, rank: int, account: RankCoverage) -> None:
        """Record another rank's account of its coverage."""
        self._others[rank] = RankCoverage.from_json({**asdict(account), "rank": rank})

    def start(self) -> None:
        """Start the background thread that looks every few seconds."""
        if self._thread is None and not self._ended:
            self._thread = Thread("ddpdebug-coverage", self._run)

    def tell(self) -> None:
        """Announce this rank's account to the others, as it leaves."""
        self._announce(self._account())

    def close(self, *, look: bool = True) -> None:
        """Stop the thread and look for the last time, unless this was no rank of the run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(0.5)
        self._ended = True
        if look:
            self.look()
        self._store = None

    # --- what is known ------------------------------------------------------------------------------------------------

    def coverage(self) -> Coverage:
        """Return the coverage as known now."""
        own = self._account()
        apart = "" if self._world == 1 else self._apart(own)
        accounts = {**self._others, self._rank: own}
        return self._tally.coverage(accounts, apart=apart, certain=self._certain, ended=self._ended)

    def _apart(self, own: RankCoverage) -> str:
        if self._phase == "none":
            return "they have no process group: nothing says who the other ranks are"
        if self._phase == "connecting":
            return _NO_CONNECTION
        if self._lost:
            return _plain(self._lost)
        if self._phase == "meeting":
            missing = self.missing
            return f"{ranks_text(missing)} did not come (started without ddpdebug?)" if missing else _NOT_REACHED
        silent = self._clock() - self._ticked > _SILENT_SECONDS and own.steps > self._steps_at_tick + 1
        return f"the other ranks have not answered for {_SILENT_SECONDS:g} s" if silent and not self._ended else ""

    def look(self) -> None:
        """Update the coverage: print what is due, and pass the record to the sinks."""
        alone = self._looking.acquire(timeout=1.0)  # one that waits for a store that is gone must not hold the end up
        try:
            now, own = self._clock(), self._account()
            self._decide(now, own)
            known = self.coverage()
            lines = self._news(known) if known.complete is not None else []
            if known.sharding and self._world > 1 and not self._sharding_said:
                self._sharding_said = True
                lines.append(known.sharding)
            gaps = tuple([(gap.part, gap.weight) for gap in known.gaps])
            keep = self._ended or gaps != self._shown or now - self._kept > _KEEP_SECONDS
            if keep:
                self._shown, self._kept = gaps, now
            if self._ended and self._sinks_open and self._rank == 0:
                lines = []  # the last line says it
            elif lines and not (self._sinks_open and self._rank == 0):
                self._speak(lines)
                lines = []
            self._write(Covered(coverage=known, say=tuple(lines), keep=keep))
            if own.remarkable and self._told != own and self._certain and not self._ended:
                self._told = own
                self._announce(own)
        finally:
            if alone:
                self._looking.release()

    def _decide(self, now: float, own: RankCoverage) -> None:
        if own.steps and not self._stepped:
            self._stepped = now
        if (own.backwards or own.made or own.children) and not self._backward:
            self._backward = now
        if self._clock() - self._ticked < _LOOK_SECONDS:
            self._steps_at_tick = own.steps
        over = (
            (self._stepped and now - self._stepped >= STEP_SECONDS)
            or (self._backward and now - self._backward >= BACKWARD_SECONDS)
            or (self._begun and self._phase not in {"", "met"} and now - self._begun >= MEET_SECONDS)
        )
        self._certain = self._certain or bool(over)

    def _news(self, known: Coverage) -> list[str]:
        """Return what was not said yet: gaps, and that they have closed."""
        gaps: dict[tuple[str, Weight], Gap] = {
            (gap.part, gap.weight): gap
            for gap in known.gaps
            if gap.weight is Weight.ESSENTIAL or (gap.part, gap.weight) in _SAID
        }
        fresh = [gap for key, gap in gaps.items() if key not in self._said]
        lines = [gap.words for gap in fresh]
        closed = self._said.keys() - gaps.keys()
        if ("ranks", Weight.ESSENTIAL) in closed and known.since is not None and not self._ended:
            lines.append(f"the ranks are compared now ({known.compared} of {known.world})")
        if ("steps", Weight.ESSENTIAL) in closed:
            lines.append("optimizer steps are seen now")
        self._said = gaps
        return lines

    def _speak(self, lines: list[str]) -> None:
        """Print where no sink does: of a rank that rank 0 does not hear, and before there are any sinks."""
        own = self._account()
        idle = not (own.backwards or own.made or own.children)
        if self._quiet or (idle and not self._sinks_open and self._world == 1):
            return
        if self._rank != 0 and not self._may_speak():
            return
        who = f"rank {self._rank}: " if self._world > 1 else ""
        text = "".join(f"ddpdebug: {who}{_printable(line)}\n" for line in lines)
        say(text)

    def _may_speak(self) -> bool:
        """Whether this rank is the one of its node that speaks besides rank 0."""
        if self._phase == "met" and not self._lost:
            return False
        return os.environ.get("LOCAL_RANK", "0") == "0" if self._claim is None else self._claim == 1

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        started = time.monotonic()
        while not self._stop.wait(
            _LOOK_SECONDS if time.monotonic() - started < _EARLY_SECONDS else _LOOK_SECONDS_LATER
        ):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - nothing of ours reaches the job
                self.off["coverage"] = f"{type(error).__name__}: {error}"
                return


def _plain(reason: str) -> str:
    """Return why the exchange ended, in words that say what it means."""
    text = reason.removeprefix("RuntimeError: ").partition("\n")[0][:160]
    return f"the connection to them was lost ({text})" if "onnection" in text or "gloo" in text.lower() else text


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
