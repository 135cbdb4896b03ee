"""The numeric guard (`--guard stop|skip`): all ranks decide alike about a step before its optimizer changes anything.

Each rank says before every optimizer step whether something is non-finite on it, and waits until all have: this is the
one part of ddpdebug that makes the job wait, and only where it was asked for. What is certain is that nobody waits for
ever: when the ranks can no longer talk, one has left, or one does not answer in time, a rank goes by its reduced
gradients, which are the same on all ranks of a healthy DDP. Torch-free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpdebug.clock import time
from ddpdebug.errors import FindingError
from ddpdebug.schema.finding import Finding, Severity

#: How long a rank waits for the others' word on a step; then it says so and never waits again.
WAIT_SECONDS = 60.0
#: How long a run that is going to end waits for the finding that says why.
FINDING_SECONDS = 10.0
#: `--max-skips` of this many steps may be skipped.
WINDOW_STEPS = 1000
_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The vote of one rank about its next optimizer step.

    Args:
        own: this rank has something non-finite: loss or gradients.
        shared: the reduced gradients are non-finite, which all ranks see alike.
        together: all ranks take this step, so that their votes are waited for (not inside Join and the like).
    """

    optimizer: int
    step: int
    own: bool
    shared: bool
    together: bool = True


class NumericGuard:
    """The voter of one rank.

    Args:
        mode: `stop` or `skip`; anything else does nothing.
        say: sends (kind, fields) to all ranks, this one too.
        trouble: told (part, message) when the ranks stop deciding together.
    """

    def __init__(
        self,
        mode: str,
        max_skips: int,
        say: Callable[..., object],
        trouble: Callable[[str, str], None],
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.mode, self._max_skips = mode, max_skips
        self.active = mode in {"stop", "skip"}
        self._say, self._trouble = say, trouble
        self._wait_seconds = wait_seconds
        # a `with` over the lock itself is C: no signal handler's exception can come between taking it and letting it go
        self._news_lock = threading.RLock()
        self._news = threading.Condition(self._news_lock)
        self._votes: dict[tuple[int, int], dict[int, bool]] = {}
        self._members: tuple[int, ...] = (0,)
        self._alone = False  # no waiting any more
        self._skipped: dict[int, deque[int]] = {}
        self._findings: deque[Finding] = deque(maxlen=_KEPT)

    # --- the training thread ------------------------------------------------------------------------------------------

    def decide(self, ballot: Ballot) -> bool:
        """Vote, wait for the other ranks, and return whether the step must be skipped or stopped."""
        if not (ballot.together and len(self._members) > 1) or self._alone:
            return ballot.shared or (ballot.own and len(self._members) == 1)
        self._say("vote", optimizer=ballot.optimizer, step=ballot.step, bad=ballot.own or ballot.shared)
        votes = self._gather((ballot.optimizer, ballot.step))
        return ballot.shared if votes is None else any(votes.values())

    def abstain(self, optimizer: int, step: int) -> None:
        """Vote for a step that this rank does not take (a gradient scaler skipped it)."""
        if self.active and not self._alone:
            self._say("vote", optimizer=optimizer, step=step, bad=False)

    def too_many(self, optimizer: int, step: int) -> str | None:
        """Count a skipped step; return the reason if the run must end now, else None."""
        steps = self._skipped.setdefault(optimizer, deque())
        steps.append(step)
        while steps[0] <= step - WINDOW_STEPS:
            steps.popleft()
        if len(steps) <= self._max_skips:
            return None
        return f"{len(steps)} of the last {WINDOW_STEPS} steps were non-finite, and --max-skips is {self._max_skips}"

    def error(self, ballot: Ballot, note: str | None = None) -> FindingError:
        """Return the error that ends the run, with the finding about this step if the rules have raised it in time."""
        deadline = time.monotonic() + FINDING_SECONDS
        with self._news_lock:
            while (found := self._newest_from(ballot.step)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    break
            known = found or (self._findings[-1] if self._findings else None)
        if known is None:
            known = Finding(
                code="NUM303" if ballot.shared else "NUM302",
                severity=Severity.CRITICAL,
                title="something is non-finite before the optimizer step",
                step=ballot.step,
            )
        return FindingError(known, note)

    def _newest_from(self, step: int) -> Finding | None:
        return next((f for f in reversed(self._findings) if f.last_step is not None and f.last_step >= step), None)

    def _gather(self, key: tuple[int, int]) -> Mapping[int, bool] | None:
        deadline = time.monotonic() + self._wait_seconds
        members = self._members
        with self._news_lock:
            while not self._alone:
                votes = self._votes.get(key, {})
                if votes.keys() >= set(self._members):
                    return self._votes.pop(key)
                if self._members != members:
                    return None  # somebody has left: what the others know of it may differ
                if (left := deadline - time.monotonic()) <= 0:
                    self._alone = True
                    break
                self._news.wait(left)
            missing = sorted(set(self._members) - self._votes.get(key, {}).keys())
        ranks = ", ".join(map(str, missing))
        self._trouble("guard", f"no word on step {key[1]} from rank {ranks}; each rank now goes by its own gradients")
        return None

    # --- the background thread ----------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """Record the vote of a rank."""
        key = int(message["optimizer"]), int(message["step"])
        with self._news_lock:
            self._votes.setdefault(key, {})[rank] = bool(message["bad"])
            while len(self._votes) > _KEPT:
                self._votes.pop(next(iter(self._votes)))
            self._news.notify_all()

    def meet(self, members: Iterable[int]) -> None:
        """Set the ranks that take part."""
        known = tuple(members)
        if known != self._members:
            with self._news_lock:
                self._members = known
                self._news.notify_all()

    def found(self, finding: Finding) -> None:
        """Record a finding."""
        if finding.code.startswith("NUM") and finding.severity >= Severity.ERROR:
            with self._news_lock:
                self._findings.append(finding)
                self._news.notify_all()

    def lost(self) -> None:
        """Note that the ranks can no longer communicate."""
        with self._news_lock:
            self._alone = True
            self._news.notify_all()
