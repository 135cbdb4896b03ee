"""Distribution of records to all sinks, secrets removed; a broken or slow sink harms neither others nor the job."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, TypeVar

from ddpdebug.errors import text_of
from ddpdebug.isolation.user_code import users_error
from ddpdebug.redaction import Redactor
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingIgnored, FindingRaised, Record, RunEnded, RunStarted, Saved, Sink, Trouble, Waiting

Item = TypeVar("Item")


class InOrder(Generic[Item]):
    """A queue for one function: any thread adds items, and the function gets one at a time, in the order of `put`.

    A thread that comes while another one is at work leaves its items to that one and returns at once, so that the
    training thread never waits for a slow disk behind somebody else's record.
    """

    def __init__(self, take: Callable[[Item], None]) -> None:
        self._take = take
        self._waiting: deque[Item] = deque()
        self._working = threading.Lock()

    def put(self, item: Item) -> None:
        """Add an item, for the next `drain` of any thread."""
        self._waiting.append(item)

    def drain(self) -> None:
        """Pass waiting items to the function, unless another thread does so already."""
        while self._waiting and self._working.acquire(blocking=False):
            try:
                while self._waiting:
                    self._take(self._waiting.popleft())
            finally:
                self._working.release()


class Fanout:
    """A sink of sinks, for any thread. A sink that raises is dropped; the others get a `Trouble` about it.

    Sinks see one record at a time, in order (`InOrder`).

    Args:
        redactor: hides what is secret in each record.
    """

    def __init__(self, sinks: Sequence[Sink], redactor: Redactor | None = None) -> None:
        self._sinks = list(sinks)
        self._redactor = redactor or Redactor()
        self._records: InOrder[Record] = InOrder(self._write_one)

    def add(self, sinks: Sequence[Sink]) -> None:
        """Add sinks; they get the records from now on."""
        self._sinks = [*self._sinks, *sinks]

    def write(self, record: Record) -> None:
        """Pass the record to each sink that still works."""
        self._records.put(record)
        self._records.drain()

    def close(self) -> None:
        """Close the sinks that have a `close` (files, sockets, threads); errors are dropped."""
        for sink in self._sinks:
            _close(sink)

    def _write_one(self, record: Record) -> None:
        record = redacted(record, self._redactor)
        users: BaseException | None = None
        for sink in tuple(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - whatever a sink does must not reach the training
                users = users_error(error) or users
                if users is None:
                    self._drop(sink, error)
        if users is not None:  # a signal's handler has raised it while a sink was writing: it is the job's
            raise users

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        name = getattr(sink, "part", type(sink).__module__.rpartition(".")[2])
        self._records.put(Trouble(part=f"sink:{name}", message=text_of(error)))
        _close(sink)


def _close(sink: Sink) -> None:
    close = getattr(sink, "close", None)
    if close is not None:
        with suppress(Exception):  # it is broken already, which has been said, or there is nobody left to tell
            close()


#: Records with one text, and its name.
_TEXT = {Trouble: "message", RunEnded: "reason", Waiting: "line"}


def redacted(record: Record, redactor: Redactor) -> Record:
    """Return a record without secrets; the same object if it contains none."""
    match record:
        case FindingRaised() | FindingIgnored():
            return replace(record, finding=redacted_finding(record.finding, redactor))
        case Trouble() | RunEnded() | Waiting():
            name = _TEXT[type(record)]
            return replace(record, **{name: redactor.text(getattr(record, name))})  # type: ignore[arg-type]  # it has it
        case Saved():
            return replace(record, payload=redactor.value(record.payload))
        case RunStarted():
            return replace(record, command=tuple(redactor.words), config=redactor.value(record.config))
    return record


def redacted_finding(finding: Finding, redactor: Redactor) -> Finding:
    """Return a finding without secrets in its texts."""
    changed = {
        name: redactor.value(getattr(finding, name))
        for name in ("title", "subject", "location", "evidence", "causes", "actions", "ignored")
    }
    return replace(finding, **{name: value for name, value in changed.items() if value is not getattr(finding, name)})
