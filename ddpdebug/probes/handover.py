"""The handover between the two threads of a rank: records of finished steps one way, plans the other.

The training thread owns everything that the probes write; the background thread owns exchange, diagnosis and findings.
These two objects are all that both may touch. Each holds a lock for a few instructions and never while it calls.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from ddpdebug.probes.record import StepRecord

#: So many finished steps are kept for questions about them.
KEPT_STEPS = 256


class StepStore:
    """Records of the newest finished steps. Added by the training thread, which does not use them afterwards."""

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[int, int], StepRecord] = OrderedDict()

    def add(self, record: StepRecord) -> None:
        """Add a record."""
        gone: StepRecord | None = None
        with self._lock:
            self._records[record.optimizer, record.step] = record
            if len(self._records) > self._limit:
                _, gone = self._records.popitem(last=False)
        del gone  # what it holds is freed outside of the lock: that may run code of the user's

    def get(self, optimizer: int, step: int) -> StepRecord | None:
        """Return the record of a step; None if it is too old or never existed."""
        with self._lock:
            return self._records.get((optimizer, step))

    def newest(self) -> StepRecord | None:
        """Return the record added last; None if there is none."""
        with self._lock:
            return next(reversed(self._records.values()), None)


class Plans:
    """Tasks for the training thread at a step that all ranks agree on; planned by the background thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, int, Any]] = []  # (kind, step, what)

    def add(self, kind: str, step: int, what: Any) -> None:
        """Plan a task of a kind for the first step end at or after a step."""
        with self._lock:
            self._waiting.append((kind, step, what))

    def take(self, kind: str, step: int | None = None) -> list[Any]:
        """Remove and return the due tasks of a kind in planning order; all of them if `step` is None."""
        if not self._waiting:  # nearly always, and asked for in every step
            return []
        with self._lock:
            due = [plan for plan in self._waiting if plan[0] == kind and (step is None or plan[1] <= step)]
            if due:
                self._waiting = [plan for plan in self._waiting if all([plan is not one for one in due])]
        return [what for _, _, what in due]
