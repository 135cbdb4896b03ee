"""Keeps scraping from taking time that belongs to training: however often somebody asks, rendering has a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ddpdebug.sinks.prometheus.connections import App
from ddpdebug.sinks.prometheus.endpoint import answer

#: Shares of the time that rendering may take in the long run, of one rank and of all ranks (with a large world answers
#: would grow old otherwise), and seconds of it that may be taken at once.
SHARE, SHARE_OF_ALL = 0.005, 0.02
_AT_ONCE = 0.1
#: Answers kept: Prometheus always asks in the same words.
_KEPT = 4

_Answer = tuple[str, list[tuple[str, str]], bytes]


class Frugal:
    """An application that renders anew while its budget lasts, and repeats its last answer otherwise.

    Args:
        share: of the time that rendering may take in the long run.
        clock: what passes, seconds.
        spent: processor time of the calling thread, seconds.
    """

    def __init__(
        self,
        app: App,
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._app, self._share, self._clock, self._spent = app, share, clock, spent
        self._credit, self._since = _AT_ONCE, clock()
        self._known: dict[tuple[str, ...], _Answer] = {}
        self._rendering = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve."""
        words = ("REQUEST_METHOD", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING", "QUERY_STRING")
        key = tuple(str(environ.get(word, "")) for word in words)
        known = self._known.get(key)
        if self._rendering.acquire(blocking=known is None):  # who can be answered does not wait
            try:
                if self._affordable():
                    known = self._render(key, environ)
            finally:
                self._rendering.release()
        if known is None:
            return answer(start_response, "503 Service Unavailable", "asked too often\n", [("Retry-After", "30")])
        status, headers, body = known
        start_response(status, headers)
        return [body]

    def _affordable(self) -> bool:
        now = self._clock()
        self._credit = min(_AT_ONCE, self._credit + self._share * (now - self._since))
        self._since = now
        return self._credit > 0

    def _render(self, key: tuple[str, ...], environ: dict[str, Any]) -> _Answer:
        begun = self._spent()
        head: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers: head.extend((status, headers))))
        self._credit -= self._spent() - begun
        while len(self._known) >= _KEPT and key not in self._known:
            self._known.pop(next(iter(self._known)))
        self._known[key] = (head[0], head[1], body)
        return self._known[key]
