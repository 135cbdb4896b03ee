"""How long a rank worked by itself in a step, and how long it waited: what tells a slow rank from one that waits.

A clock around `backward` says nothing about that: a rank that is early waits inside it for the last one. What is a
rank's own ends with the last gradient that it computes itself, which the hooks on the parameters see.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, StepClosing


@dataclass(slots=True)
class OwnTimes(Part, key="probe:own-times"):
    """The times of one step that are this rank's own, and those that are not; seconds."""

    backward: float = 0.0
    sync_wait: float = 0.0
    cpu: float = math.nan

    def passed(self, started: float, ended: float, last: float, *, reduced: bool) -> None:
        """Add a backward pass.

        Args:
            started: by `time.perf_counter`, as the others.
            last: when the newest gradient of this rank's own had come, in whatever pass.
            reduced: DDP has reduced gradients in it; else all of it is the rank's own.
        """
        if not reduced:
            last = ended
        elif not started <= last <= ended:
            last = math.nan  # nobody looks at its gradients yet
        self.backward += last - started
        self.sync_wait += ended - last

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return all of them."""
        return {
            "backward_local_seconds": self.backward,
            "sync_wait_seconds": self.sync_wait,
            "cpu_seconds": self.cpu,
        }


class OwnClock:
    """Reads, from step to step, the processor time of the thread that trains."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state = state
        self._cpu = math.nan
        guard.needs("probe:own-times", "probe:backward")
        bus.on("probe:own-times", StepClosing, self._close)

    def _close(self, _: StepClosing) -> None:
        before, self._cpu = self._cpu, time.thread_time()
        self._state.since.parts[OwnTimes].cpu = self._cpu - before
