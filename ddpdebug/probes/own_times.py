"""The time that a rank worked by itself in a step, and the time that it waited: they separate slow from waiting ranks.

A clock around `backward` says nothing about that: a rank that is early waits inside it for the last one. What is a
rank's own ends with the last gradient that it computes itself, which the hooks on the parameters see. Other collectives
are left out of every phase (`step_state.Clock`): the buffers that DDP broadcasts as a forward begins, and the functions
of `torch.distributed` while they run, whoever calls them in the thread that trains. Waiting later for what was only
begun there (`async_op=True`) is not seen: a function of Python in the place of `Work.wait` would be taken for the
override of a script's own class of works, and call itself for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, ForwardFailed, ForwardPrepared, StepClosing


@dataclass(slots=True)
class OwnTimes(Part, key="probe:own-times"):
    """This rank's own times in one step, and its waiting times; seconds."""

    backward: float = 0.0
    sync_wait: float = 0.0
    collectives: float = math.nan
    cpu: float = math.nan

    def passed(self, started: float, ended: float, last: float, *, reduced: bool) -> None:
        """Add a backward pass.

        Args:
            started: by the state's clock, as the others.
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
        """Return all of these times."""
        return {
            "backward_local_seconds": self.backward,
            "sync_wait_seconds": self.sync_wait,
            "collective_seconds": self.collectives,
            "cpu_seconds": self.cpu,
        }


class OwnClock:
    """Reads, from step to step, the time in collectives and the processor time of the training thread."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state = state
        self._cpu, self._away = math.nan, 0.0
        self._broadcasts = False  # a DDP broadcasts its buffers now
        guard.needs("probe:own-times", "probe:backward", "probe:forward")
        guard.when_cut(self._cut)
        bus.on("probe:own-times", ForwardBegan, self._forward_began)
        bus.on("probe:own-times", ForwardPrepared, self._prepared)
        bus.on("probe:own-times", ForwardFailed, self._prepared)
        bus.on("probe:own-times", StepClosing, self._close)

    def _forward_began(self, event: ForwardBegan) -> None:
        if internals.syncs_buffers_now(event.ddp):
            self._broadcasts = True
            self._state.clock.stop()

    def _prepared(self, _: ForwardPrepared | ForwardFailed) -> None:
        if self._broadcasts:
            self._broadcasts = False
            self._state.clock.go_on()

    def _close(self, _: StepClosing) -> None:
        cpu, self._cpu = self._cpu, time.thread_time()
        times, away = self._state.since.parts[OwnTimes], self._begin()
        times.cpu, times.collectives = self._cpu - cpu, away

    def _cut(self) -> None:
        self._cpu = math.nan  # in whatever thread that was
        self._begin()

    def _begin(self) -> float:
        """Begin another step; return the seconds in collectives of this one."""
        clock, away = self._state.clock, self._away
        clock.reset()
        self._broadcasts, self._away = False, clock.away
        return self._away - away
