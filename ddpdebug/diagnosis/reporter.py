"""Keeps the findings of a run: adds time and later evidence, and passes them to the sinks. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpdebug.clock import utc_now
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.likeliest import likeliest_first
from ddpdebug.sinks import FindingIgnored, FindingRaised, Record
from ddpdebug.sinks.fanout import InOrder


class Reporter:
    """The findings of one rank's monitor, oldest first.

    Args:
        write: hands a record to the sinks.
        clock: gives the time for new findings, UTC in ISO 8601.
    """

    def __init__(self, write: Callable[[Record], None], clock: Callable[[], str]) -> None:
        self.run_id = ""
        self._clock = clock
        self._lock = threading.Lock()  # written by the background thread; read, and added to, by any
        self._known: dict[str, Finding] = {}
        self._extra: dict[str, Mapping[str, Any]] = {}
        self._records: InOrder[Record] = InOrder(write)

    @property
    def findings(self) -> list[Finding]:
        """The findings so far, oldest first, without ignored ones."""
        with self._lock:
            return [finding for finding in self._known.values() if not finding.ignored]

    @property
    def known(self) -> list[Finding]:
        """The findings so far, oldest first, with ignored ones."""
        with self._lock:
            return list(self._known.values())

    def report(self, raised: Sequence[tuple[Finding, bool]]) -> list[Finding]:
        """Take (finding, new) pairs from the diagnosis; return the new findings as they were written.

        Each record holds all that is known of its finding: a sink replaces what it has under the same `Finding.id`.
        """
        fresh: list[Finding] = []
        for finding, new in raised:
            with self._lock:
                stamped = self._stamped(finding, new=new)
            if new and not stamped.ignored:
                fresh.append(stamped)
            self._records.drain()
        return fresh

    def _stamped(self, finding: Finding, *, new: bool) -> Finding:
        key = key_of(finding)
        known = self._known.get(key)
        finding = replace(finding, evidence={**finding.evidence, **self._extra.get(key, {})})
        causes, actions = likeliest_first(finding)
        stamped = self._known[key] = replace(
            finding,
            causes=causes,
            actions=actions,
            time=self._clock() if known is None else known.time,
            run=self.run_id,
        )
        self._records.put(FindingIgnored(stamped) if stamped.ignored else FindingRaised(finding=stamped, new=new))
        return stamped

    def add(self, key: str, evidence: Mapping[str, Any]) -> None:
        """Add evidence to a reported finding; it stays through later updates."""
        with self._lock:
            if key in self._known:
                self._extra[key] = {**self._extra.get(key, {}), **evidence}
                self._stamped(self._known[key], new=False)
        self._records.drain()

    def add_to(self, code: str, evidence: Mapping[str, Any]) -> None:
        """Add evidence to all findings of a code."""
        with self._lock:
            keys = [key for key, finding in self._known.items() if finding.code == code]
        for key in keys:
            self.add(key, evidence)


def key_of(finding: Finding) -> str:
    """Return the id that `Incidents` gave to a finding: unique within a run, and the same on every rank."""
    assert finding.id is not None, "a finding that no incident has admitted"
    return finding.id


def unravel(flat: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element from its position `flat` in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return index[::-1]


def utc() -> str:
    """Return the time in UTC as ISO 8601."""
    return utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
