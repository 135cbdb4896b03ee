"""The time that Python's garbage collector takes in a step: it stops all threads of the interpreter.

Each collection is in it. Most take microseconds; those of the oldest generation walk over all objects, and a rank that
makes one makes the others wait.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import STAMPS, entries_of
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, StepClosing

#: Times that are kept between two steps. Where there are more, as in an evaluation, the time of that step is not known.
_KEPT = 4096


@dataclass(slots=True)
class Pauses(Part, key="probe:collector"):
    """The time in the garbage collector, in seconds."""

    seconds: float = math.nan

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the time in the garbage collector."""
        return {"gc_seconds": self.seconds}


class CollectorPauses:
    """Adds up the collector's pauses from step to step, from the end of the first step on."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state, self._entries = state, entries_of(guard)
        self._stamps: deque[float] = deque(maxlen=_KEPT)
        self._collections = 0
        self._is_placed: Callable[[], bool] | None = None
        guard.when_cut(self._cut)
        bus.on("probe:collector", StepClosing, self._close)

    def _close(self, _: StepClosing) -> None:
        if self._is_placed is None:
            self._is_placed = self._entries.on_collections("probe:collector", self._stamps)
            self._begin()
        elif self._stamps or not self._is_placed():
            self._state.since.parts[Pauses].seconds = self._begin()
        else:
            self._state.since.parts[Pauses].seconds = 0.0

    def _cut(self) -> None:
        self._begin()

    def _begin(self) -> float:
        """Begin another step; return the seconds of this one, NaN where not every collection was seen."""
        before, self._collections = self._collections, sum(one["collections"] for one in gc.get_stats())
        times = []
        while self._stamps:  # one by one: any thread may collect meanwhile
            times.append(self._stamps.popleft())
        if len(times) != 2 * STAMPS * (
            self._collections - before
        ):  # the script calls callbacks, or has taken them away
            return math.nan
        return sum(times[STAMPS :: 2 * STAMPS]) - sum(times[:: 2 * STAMPS])
