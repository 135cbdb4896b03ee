"""Keeps the findings of a run: stamps them, adds what is found out later, hands them to the sinks. Torch-free."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingRaised, Record


class Reporter:
    """The findings of one rank's monitor, oldest first.

    Args:
        write: hands a record to the sinks.
        clock: gives the time for new findings, UTC in ISO 8601.
    """

    def __init__(self, write: Callable[[Record], None], clock: Callable[[], str]) -> None:
        self.run_id = ""
        self._write, self._clock = write, clock
        self._lock = threading.Lock()  # written by the background thread; read, and added to, by any
        self._known: dict[str, Finding] = {}
        self._extra: dict[str, Mapping[str, Any]] = {}

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, oldest first."""
        with self._lock:
            return list(self._known.values())

    def report(self, raised: Sequence[tuple[Finding, bool]]) -> list[Finding]:
        """Report findings of the diagnosis, (finding, new); return the new ones as they were written."""
        fresh: list[Finding] = []
        for finding, new in raised:
            key = key_of(finding)
            with self._lock:
                known = self._known.get(key)
                stamped = replace(
                    finding,
                    evidence={**finding.evidence, **self._extra.get(key, {})},
                    time=self._clock() if known is None else known.time,
                    run=self.run_id,
                )
                self._known[key] = stamped
            self._write(FindingRaised(finding=stamped, new=new))
            if new:
                fresh.append(stamped)
        return fresh

    def add(self, key: str, evidence: Mapping[str, Any]) -> None:
        """Add evidence to a finding that was reported before; it stays through later updates."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return
            self._extra[key] = evidence
        self.report([(known, False)])

    def add_to(self, code: str, evidence: Mapping[str, Any]) -> None:
        """Add evidence to all findings of a code."""
        with self._lock:
            keys = [key for key, finding in self._known.items() if finding.code == code]
        for key in keys:
            self.add(key, evidence)


def key_of(finding: Finding) -> str:
    """Return what identifies a finding within a run."""
    return finding.id or f"{finding.code}@{finding.step}:{finding.ranks}:{','.join(finding.subject[:1])}"


def unravel(flat: int, shape: Sequence[int]) -> list[int]:
    """Return the index of the element that is the `flat`-th in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return index[::-1]


def utc() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
