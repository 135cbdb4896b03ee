"""Follows one test in its ranks to its end, or to the deadline. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpdebug.pytest_plugin.results import RankResult

#: Loading torch and the user's conftest files may take long on a busy machine.
START_SECONDS = 180.0
#: How long the others may take to tell what the first failure did to them.
_GRACE_SECONDS = 3.0


@dataclass(slots=True)
class Task:
    """What a test asks for."""

    nodeid: str
    path: str
    world: int
    timeout: float
    device: str
    group: bool


@dataclass(slots=True)
class Outcome:
    """How a test went in all ranks."""

    ranks: list[RankResult]
    warnings: list[dict[str, Any]] = field(default_factory=list)
    stop: str | None = None  # a rank called `pytest.exit`
    trouble: str | None = None  # the ranks could not be started


class Ranks(Protocol):
    """What following needs of the pool."""

    def look(self, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """Wait for something to happen; return what ranks said."""

    def statuses(self) -> Mapping[int, int]:
        """Return the exit statuses of the ranks that have ended."""

    def ask_where(self, numbers: Sequence[int]) -> Mapping[int, str]:
        """Return the stacks of ranks that are still running."""


class Run:
    """Follows one test in its ranks to its end."""

    def __init__(self, pool: Ranks, task: Task, outcome: Outcome) -> None:
        self._pool, self._task, self._outcome = pool, task, outcome
        self._ranks = outcome.ranks
        self._started = False
        self._deadline = time.monotonic() + START_SECONDS  # collecting the file counts as starting
        self._first_failure: float | None = None

    def follow(self) -> None:
        """Wait for all ranks; end those that take too long."""
        while waiting := [rank for rank in self._ranks if not rank.over]:
            left = self._limit() - time.monotonic()
            if left <= 0:
                self._give_up(waiting)
                return
            for number, message in self._pool.look(left):
                self._hear(self._ranks[number], message)
            self._note_deaths()
            self._set_limits()

    def _limit(self) -> float:
        if self._first_failure is None:
            return self._deadline
        return min(self._deadline, self._first_failure + _GRACE_SECONDS)

    def _set_limits(self) -> None:
        if not self._started and all(rank.started or rank.over for rank in self._ranks):
            self._started = True
            self._deadline = time.monotonic() + self._task.timeout
        if self._first_failure is None and any(rank.failed_by_itself() and rank.over for rank in self._ranks):
            self._first_failure = time.monotonic()

    def _hear(self, rank: RankResult, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "started":
            rank.started = True
        elif kind == "report":
            rank.reports.append(message["data"])
        elif kind == "lacking":
            rank.lacking, rank.lacking_time = message["text"], message["time"]
        elif kind == "warning":
            self._outcome.warnings.append(message)
        elif kind == "stop":
            self._outcome.stop = message["reason"]
        elif kind == "finished":
            rank.finished = True

    def _note_deaths(self) -> None:
        for number, status in self._pool.statuses().items():
            if number < len(self._ranks) and not self._ranks[number].over:
                while said := self._pool.look(0.0):  # its last messages may still be on the way
                    for other, message in said:
                        self._hear(self._ranks[other], message)
                if not self._ranks[number].over:
                    self._ranks[number].died(status, time.time())

    def _give_up(self, waiting: Sequence[RankResult]) -> None:
        stacks = self._pool.ask_where([rank.rank for rank in waiting])
        for rank in waiting:
            rank.gave_up(time.time(), stacks.get(rank.rank, ""), at_deadline=self._first_failure is None)
