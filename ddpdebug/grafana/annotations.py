"""Sends each new finding to Grafana as an annotation, from a thread of its own. Torch-free.

Nothing waits for Grafana: a finding that cannot be sent in three tries is dropped and counted, and so is what comes
after it, for the sink gives up then; that is said once, by the fan-out.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable

from ddpdebug.grafana.client import Grafana
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted
from ddpdebug.sinks.text import clean, where

_WAITING = 100
_TRIES = 3
_PAUSE_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
_MAX_RANKS = 8


class Annotations:
    """The sink that makes a Grafana annotation of each new finding, on rank 0 only.

    Args:
        connect: makes the client; called in the sink's thread, may raise.
    """

    def __init__(self, connect: Callable[[], Grafana], clock: Callable[[], float] = time.time) -> None:
        self._connect, self._clock = connect, clock
        self._run_id, self._world = "", 1
        self._queue: queue.Queue[tuple[Finding, int] | None] = queue.Queue(_WAITING)
        self._given_up = False
        self._closing = threading.Event()
        self._error = ""
        self._grafana: Grafana | None = None
        self.dropped = 0
        self._thread = threading.Thread(target=self._send_all, name="ddpdebug-annotations", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a new finding; raise OSError once Grafana is given up."""
        if self._given_up:
            raise OSError(f"{self.dropped} annotations were not sent: {self._error}")
        match record:
            case RunStarted():
                self._run_id, self._world = record.run_id, record.world
            case FindingRaised() if record.new:
                try:
                    self._queue.put_nowait((record.finding, round(1000 * self._clock())))
                except queue.Full:
                    self.dropped += 1
            case RunEnded():
                self.close()
                if self.dropped:
                    raise OSError(f"{self.dropped} annotations were not sent: {self._error or 'too many at once'}")

    def close(self) -> None:
        """Give what is queued a few seconds."""
        self._closing.set()
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return  # the thread is stuck in Grafana's silence, and dies with the process
            self._thread.join(_CLOSE_SECONDS)

    def _send_all(self) -> None:
        # to write to who has hung up would end a job that has SIGPIPE back at its default
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        while (entry := self._queue.get()) is not None and not self._given_up:
            if not any(self._try(*entry) for _ in range(_TRIES)):  # sent twice is kept once
                self._given_up = True
                self.dropped += 1 + sum(1 for rest in tuple(self._queue.queue) if rest is not None)

    def _try(self, finding: Finding, milliseconds: int) -> bool:
        try:
            self._grafana = self._grafana or self._connect()
            self._send(self._grafana, finding, milliseconds)
        except Exception as error:  # noqa: BLE001 - whatever Grafana does must not reach the training
            self._error = clean(f"{type(error).__name__}: {error}", 300)
            self._closing.wait(_PAUSE_SECONDS)
            return False
        return True

    def _send(self, grafana: Grafana, finding: Finding, milliseconds: int) -> None:
        ranks = [f"rank:{rank}" for rank in finding.ranks[:_MAX_RANKS]]
        tags = [f"run:{self._run_id}", f"code:{finding.code}", f"severity:{finding.severity.label}", *ranks]
        what = clean(finding.subject[0], 160) if finding.subject else ""
        lines = [f"{finding.code}: {clean(finding.title, 200)}", where(finding, self._world), what]
        text = "\n".join(filter(None, [*lines, f"ddpdebug explain {finding.code}"]))
        grafana.annotate(f"{self._run_id}/{finding.id}", text, tags, milliseconds)
