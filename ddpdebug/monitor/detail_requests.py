"""Detail requests of the diagnosis to this rank that wait for their answer. Background thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddpdebug.forensics.memory.holder_search import HolderSearch
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.details import Sources, answer, is_known
from ddpdebug.probes.handover import StepStore
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.schema.details import Detail
from ddpdebug.schema.requests import Request

#: An answer may wait so many ticks for what only the next step shows.
_TICKS = 60
#: What the user's tables say when the training thread changes them while they are read here; the next look succeeds.
_CHANGED = ("changed size during iteration", "mutated during iteration", "changed during iteration")


class Answering:
    """Answers detail requests about recent steps, once the answer is complete or the request has waited long enough.

    Args:
        state: what takes part in the steps.
        holders: looks for who holds on to memory.
        store: the recent steps.
        last: what the last steps have left.
        say: sends (kind, fields) to all ranks.
        guard: the background thread's own.
    """

    def __init__(
        self,
        state: StepState,
        holders: HolderSearch,
        store: StepStore,
        last: StepStore,
        say: Callable[..., object],
        guard: Guard,
    ) -> None:
        self._sources, self._store, self._last = Sources(state, holders), store, last
        self._say, self._guard = say, guard
        self._asked: list[tuple[Request, int]] = []

    def ask(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self._asked += [(request, 0) for request in requests]

    def again(self, record: StepRecord, kind: str) -> None:
        """Send an answer again, requested or not, after new facts have become known; from any thread."""
        value = answer(kind, record, self._sources)
        self._tell(Request(optimizer=record.optimizer, step=record.step, kind=kind), value)

    def now(self, request: Request) -> Detail | None:
        """Return the answer as known now; None if there is none."""
        record, part = self._record(request), f"answer:{request.kind}"
        value = None if record is None else self._guard.run(part, self._try, answer, request.kind, record)
        return None if value is _LATER else value

    def _record(self, request: Request) -> StepRecord | None:
        return (self._last if request.last else self._store).get(request.optimizer, request.step)

    def work(self, *, patient: bool) -> None:
        """Answer the requests whose answers are complete; all of them, if not `patient`."""
        asked, self._asked = self._asked, []
        for request, ticks in asked:
            record = self._record(request)
            part = f"answer:{request.kind}"
            if record is not None and patient and ticks < _TICKS:
                known = self._guard.run(part, self._try, is_known, request.kind, record)
                if known is False or known is _LATER:
                    self._asked.append((request, ticks + 1))
                    continue
            value = None if record is None else self._guard.run(part, self._try, answer, request.kind, record)
            if value is _LATER:
                if ticks < _TICKS:
                    self._asked.append((request, ticks + 1))
                    continue
                value = None
            self._tell(request, value)

    def _tell(self, request: Request, value: Detail | None) -> None:
        fields = {"optimizer": request.optimizer, "step": request.step, "last": request.last, "detail": request.kind}
        if self._say("detail", **fields, value=value) is False:  # nothing that JSON can say: the others wait for a word
            self._say("detail", **fields, value=None)

    def _try(self, look: Callable[[str, StepRecord, Sources], Any], kind: str, record: StepRecord) -> Any:
        try:
            return look(kind, record, self._sources)
        except RuntimeError as error:
            if any([text in str(error) for text in _CHANGED]):
                return _LATER
            raise


_LATER = object()
