"""The stop of a hanging job, if requested: `--on-hang stop`, and `check` under a launcher.

A rank leaves once a hang stands (`schema/hangs.py`), and as long as nobody is at work: a checkpoint that rank 0
writes while the others wait for a rank that has gone is worth more than the seconds. Ranks that can talk say that they
are ready, and leave in the same tick. Where they cannot, each goes by what it has judged, or finds written in the run
directory.

Nothing is shut down in order. The training thread is inside a collective, which returns to Python for nobody: an
exception cannot be raised there, exit handlers would run beside it, and `destroy_process_group`, the destructors of
gloo and NCCL and the interpreter's own teardown wait for that collective, or for the peer that does not come. So what a
rank knows is written down, and the process leaves by `os._exit`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from ddpdebug.clock import time
from ddpdebug.isolation.background import Timer
from ddpdebug.progress.waits import STUCK_SECONDS, Seen
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.hangs import Standing, is_by_hang, name_of, stands
from ddpdebug.schema.progress import RankProgress
from ddpdebug.sinks.words import culprits_text

#: As `check` exits for a hang.
EXIT_STATUS = 4
#: What is written down on the way out may meet a disk that does not answer.
_LEAVING_SECONDS = 30.0
#: The run directory is read so often, seconds.
_READ_SECONDS = 1.0
_CHILDREN_SECONDS = 0.5
#: From the tick in which all are ready to the moment at which they leave.
TOGETHER_SECONDS = 1.0


class HangStop:
    """Decides when this rank exits. Used by one thread at a time.

    Args:
        findings: returns what this rank has found.
        written: returns what stands in the run directory.
        say: tells all ranks, which hear it in the same tick, that this one is ready.
        leave: ends this process, a little later where all ranks do: whose evidence is written first must not throw the
            others out of their collectives.
    """

    def __init__(
        self,
        *,
        findings: Callable[[], Sequence[Finding]],
        written: Callable[[], Sequence[Finding]],
        say: Callable[[str], object],
        leave: Callable[[Finding, float], object],
    ) -> None:
        self._findings, self._written, self._say, self._leave = findings, written, say, leave
        self._standing = Standing()
        self._ready: dict[str, set[int]] = {}  # hang -> ranks
        self._said: set[str] = set()
        self._read: tuple[float, Sequence[Finding]] = 0.0, ()

    def hear(self, rank: int, hang: str) -> None:
        """Note that a rank is ready to exit."""
        self._ready.setdefault(hang, set()).add(rank)

    def tick(self, own: RankProgress, needed: Collection[int], now: float) -> None:
        """Announce that this rank is ready to exit, and exit once all are: they have heard the same.

        Args:
            needed: the ranks that take part and have not ended.
        """
        known = {name_of(finding): finding for finding in self._findings() if stands(finding)}
        self._ready = {name: ranks for name, ranks in self._ready.items() if name in known}
        self._said &= known.keys()
        due = self._standing.due(known.values(), now)
        if due is not None and is_at_rest(own) and name_of(due) not in self._said:
            self._said.add(name_of(due))
            self._say(name_of(due))
        for name, ranks in self._ready.items():
            if ranks >= set(needed):
                self._leave(known[name], TOGETHER_SECONDS)

    def standing(self) -> Finding | None:
        """Return a persistent hang that this rank knows of; None if there is none."""
        return next(filter(stands, (*self._findings(), *self._written())), None)

    def alone(self, own: RankProgress, others: Iterable[Seen], now: float) -> None:
        """Exit if a hang persists and every visible rank is idle."""
        if now - self._read[0] >= _READ_SECONDS:
            self._read = now, self._written()
        known = {name_of(finding): finding for finding in self._read[1]}
        known |= {name_of(finding): finding for finding in self._findings()}  # these are newer
        due, others = self._standing.due(known.values(), now), list(others)
        if due is None and any(one.progress is not None and is_by_hang(one.progress.ended) for one in others):
            due = next(filter(stands, known.values()), None)  # another rank, whose clock began earlier, has left
        if due is not None and is_at_rest(own) and not any(map(_is_at_work, others)):
            self._leave(due, 0.0)


def is_at_rest(look: RankProgress) -> bool:
    """Whether a rank waits for others, or makes no progress."""
    return look.waiting or look.still >= STUCK_SECONDS


def _is_at_work(seen: Seen) -> bool:
    return not seen.left and not seen.silent and seen.progress is not None and not is_at_rest(seen.progress)


def line_of(finding: Finding, rank: int) -> str:
    """Return the line that a rank prints as it exits."""
    where = f", {finding.location}" if finding.location else ""
    who, silent = culprits_text(finding), ""
    if finding.phase == "interpreter":
        silent = f"; {who} cannot leave by itself, that is left to the launcher"
    return (
        f"ddpdebug: rank {rank} leaves with exit status {EXIT_STATUS}, because the job hangs and --on-hang is stop: "
        f"{finding.code} {finding.title} ({who}{where}){silent}"
    )


def leave_in_time(seconds: float = _LEAVING_SECONDS) -> None:
    """End this process after `seconds` at the latest, even if its exit handlers block."""
    with suppress(RuntimeError):  # no more threads
        Timer("ddpdebug-leaving", seconds, os._exit, EXIT_STATUS)


def end_children() -> None:
    """Terminate daemonic child processes, as the interpreter does at exit: a loader's workers may never end."""
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    for child in daemons:
        child.terminate()
    until = time.monotonic() + _CHILDREN_SECONDS
    while time.monotonic() < until and any(child.is_alive() for child in daemons):
        time.sleep(0.02)
    for child in daemons:
        if child.is_alive():  # stopped, or it does not heed the signal
            child.kill()
