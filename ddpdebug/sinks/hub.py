"""The sink that has a hub told of the run. It sends nothing: a process beside the rank reads the run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ddpdebug.clock import time
from ddpdebug.sinks import Record, RunEnded, RunStarted, Trouble

#: What is waited for at the end of a rank that nothing outlives.
_LAST_WORDS = 2.0
_EVERY = 1.0


class Pusher(Protocol):
    """The rank's end of a process that pushes; nothing waits but where it says so."""

    def tell(self, **facts: Any) -> None:
        """Tell it `url`, `token`, `token_file` and `directory`, and later `end`."""

    def hear(self, seconds: float = 0.0) -> Mapping[str, Any]:
        """Return what it has said, waiting so long for it; empty where that is nothing."""

    def close(self) -> None:
        """Let go of it."""


class HubSink:
    """The sink that has a hub told of the run, on rank 0 only; behind the one that writes the run directory.

    Args:
        settings: `url`, `token` and `token_file`.
        contained: nothing outlives the rank here: its end waits a moment for the last push.
        tell: called with a `Trouble` when the hub does not take the run.
    """

    part = "hub"  # what messages call it

    def __init__(
        self,
        pusher: Pusher,
        directory: Path,
        settings: Mapping[str, str],
        *,
        contained: bool,
        tell: Callable[[Trouble], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pusher, self._directory, self._settings = pusher, directory, settings
        self._contained, self._tell, self._clock = contained, tell, clock
        self._heard = clock()

    def write(self, record: Record) -> None:
        """Have the run pushed from its first record on, and say what the hub has against it."""
        match record:
            case RunStarted():
                self._pusher.tell(**self._settings, directory=str(self._directory))
            case RunEnded():
                self._end()
            case Trouble():
                pass  # it may be what was heard
            case _ if self._clock() - self._heard >= _EVERY:
                self._heard = self._clock()
                self._say(self._pusher.hear())

    def close(self) -> None:
        """Let go of the process, which goes on until the hub has the run."""
        self._pusher.close()

    def _end(self) -> None:
        self._say(self._pusher.hear())
        self._pusher.tell(end=True)
        until = self._clock() + _LAST_WORDS
        while self._contained and (left := until - self._clock()) > 0:
            said = self._pusher.hear(left)
            self._say(said)
            if not said or "done" in said:
                break
        self._pusher.close()

    def _say(self, said: Mapping[str, Any]) -> None:
        if isinstance(message := said.get("trouble"), str):
            self._tell(Trouble(part="sink:hub waiting", message=message))
