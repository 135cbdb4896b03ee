"""The questions that the diagnosis has asked this rank and that wait for their answer. Background thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddpdebug.diagnosis import Request
from ddpdebug.probes.answers import answer, is_known
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.recorder import Recorder

#: An answer may wait so many ticks for what only the next step shows.
_TICKS = 60


class Answering:
    """Answers from the ring of recent steps, as soon as the answer is complete or has waited long enough.

    Args:
        ring: the recent steps.
        last: what the last steps have left.
        say: sends (kind, fields) to all ranks.
    """

    def __init__(
        self, recorder: Recorder, ring: Iterable[StepRecord], last: Iterable[StepRecord], say: Callable[..., None]
    ) -> None:
        self._recorder, self._ring, self._last, self._say = recorder, ring, last, say
        self._asked: list[tuple[Request, int]] = []

    def ask(self, requests: Iterable[Request]) -> None:
        """Take questions."""
        self._asked += [(request, 0) for request in requests]

    def work(self, *, patient: bool) -> None:
        """Answer what can be answered; everything, if not `patient`."""
        waiting: list[tuple[Request, int]] = []
        recorder = self._recorder
        for request, ticks in self._asked:
            place = (request.optimizer, request.step)
            record = next(
                (r for r in (self._last if request.last else self._ring) if (r.optimizer, r.step) == place), None
            )
            wait = patient and ticks < _TICKS
            if record is not None and wait and not is_known(request.kind, record, recorder):
                waiting.append((request, ticks + 1))
                continue
            value: Any = None
            if record is not None:
                value = recorder.guard.run(f"answer:{request.kind}", answer, request.kind, record, recorder)
            place_said = {"optimizer": request.optimizer, "step": request.step, "last": request.last}
            self._say("detail", **place_said, detail=request.kind, value=value)
        self._asked = waiting
