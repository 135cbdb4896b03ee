"""The sinks that use a process beside this rank: one serves its records, one sends the run directory to a hub."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ddpdebug.clock import time
from ddpdebug.companion.calls import dumped, json_of_record
from ddpdebug.config.settings import Config
from ddpdebug.processes.beside import Beside, Channel, GoneError, knock
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, Saved, StepJudged, Trouble
from ddpdebug.sinks.prometheus.listening import Serving

#: The address is waited for so long, which takes as long as a process needs to start; and at the end, until the port
#: is free or somebody else's.
_ADDRESS_SECONDS, _END_SECONDS = 5.0, 0.5
#: The process of the node's first rank may start as late after this one has met it, and again after it has died.
_DOOR_SECONDS, _AGAIN_SECONDS = 2.0, 10.0
#: So often another process is started in the place of one that has died.
_STARTS = 5
#: What a process that is stopped, or far too slow, has not taken is dropped beyond so many bytes.
_BEHIND = 4 << 20
#: What is waited for at the end of a rank that nothing outlives; how often what pushes is heard.
_PUSH_SECONDS, _HEAR_SECONDS = 2.0, 1.0
#: What the next process reads in the run directory.
_LOGGED = (RunStarted, StepJudged, Saved, FindingRaised)


class Host:
    """The companion process for judging and for serving; started again if it is gone."""

    def __init__(self) -> None:
        #: By what another rank's process on this node is found, which serves this rank too.
        self.joins: str | None = None
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._process: Beside | None = None

    def judge(self) -> Channel:
        """Return the channel to the rules; raise OSError if there can be no process."""
        return self._channel(0)

    def records(self, patience: float = _DOOR_SECONDS, *, own: bool = True) -> Channel:
        """Return a channel to the server of records; raise OSError if there can be no process.

        Args:
            patience: another rank's process is waited for so long, seconds.
            own: otherwise one beside this rank is.
        """
        if self.joins is not None and os.getpid() == self._owner:
            try:
                return knock(self.joins, patience)
            except OSError:
                if not own:
                    raise GoneError("it has not been started again") from None
        return self._channel(1)

    def close(self) -> None:
        """Release the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _channel(self, number: int) -> Channel:
        if os.getpid() != self._owner:  # a forked child is not the rank, and may have got the lock closed
            raise OSError("this process has been forked")
        with self._lock:
            if self._process is None or any([channel.gone for channel in self._process.channels]):
                self.close()
                self._process = Beside("ddpdebug.companion.process", self._owner, channels=2)
            return self._process.channels[number]


class Served:
    """The sink that sends records to the serving process.

    Args:
        settings: of the endpoint (`settings_of`).

    Raises:
        OSError: there can be no such process.
    """

    part: ClassVar[str] = "prometheus"  # what messages call it

    def __init__(self, host: Host, settings: Mapping[str, Any]) -> None:
        self._host, self._settings, self._starts = host, dict(settings), 1
        self._first = b""
        #: The run directory, from which a process that follows another goes on.
        self.log: Path | None = None
        self._tell: Callable[[Trouble], object] = lambda _: None
        self.url: str | None = None
        self._rank, self._leads = -1, None  # this one, and the one whose steps are those of all
        self._door, self._died = b"", 0.0
        self._channel = host.records()
        with suppress(GoneError):
            self._send(serve=self._settings)

    def report(self, tell: Callable[[Trouble], object]) -> None:
        """Set the function that takes troubles."""
        self._tell = tell

    def open(self) -> str:
        """Bind the port and return the address; raise OSError if that fails."""
        said = dict[str, Any]()
        with suppress(GoneError):
            said = json.loads(self._channel.receive(_ADDRESS_SECONDS) or b"{}")
        if "url" not in said:
            self._channel.close()
            raise OSError(*said.get("failed", ["the process beside this rank does not answer"]))
        self.url, self._leads = said["url"], said["leads"]
        return self.url

    def let_in(self, door: str, rank: int) -> None:
        """Let the same process serve other ranks of this node, with steps from this rank."""
        self._door = dumped({"door": door, "rank": rank})
        with suppress(GoneError):  # the first record starts another one
            self._channel.send(self._door)

    def write(self, record: Record) -> None:
        """Send a record; raise OSError if there can be no process any more."""
        known = isinstance(record, StepJudged) and self._is_known(record.step)
        about = None if known else json_of_record(record)
        if about is None and not known:
            return
        message = b"" if known else dumped({"record": about})
        if isinstance(record, RunStarted):
            self._first, self._rank = message, record.rank
        try:
            self._hear()
            if message and (self._channel.behind < _BEHIND or isinstance(record, RunStarted | RunEnded)):
                self._channel.send(message)
        except GoneError:
            self._again(record, message)
        if isinstance(record, RunEnded):
            self._end()

    def close(self) -> None:
        """Release the process, which goes on serving the run's result if it was sent."""
        self._channel.close()

    def _is_known(self, step: Step) -> bool:
        """Whether the first rank of the node has sent it."""
        return self._leads is not None and self._leads != self._rank and self._leads in step.rows and not step.chosen

    def _send(self, **message: Any) -> None:
        self._channel.send(dumped(message))

    def _hear(self) -> None:
        while (message := self._channel.receive()) is not None:
            if "leads" in (said := json.loads(message)):
                self._leads = said["leads"]
            elif "trouble" in said:
                self._tell(Trouble(part=said["trouble"][0], message=said["trouble"][1]))

    def _again(self, record: Record, message: bytes) -> None:
        """Have another process go on, at the same address."""
        if self._starts >= _STARTS:
            raise OSError("the process that serves the metrics has died")
        now, last = time.monotonic(), isinstance(record, RunEnded)
        self._died = self._died or now
        self._channel.close()  # the script may have its number
        try:
            self._channel = self._host.records(0.0, own=last or now - self._died >= _AGAIN_SECONDS)
        except GoneError:
            return  # it is looked for as the next record comes
        except OSError:  # so is what does not start now
            self._starts += 1
            return
        self._starts, self._died, self._leads = self._starts + 1, 0.0, None
        port = int(str(self.url).removesuffix("/metrics").rpartition(":")[2])
        with suppress(GoneError):
            log = None if self.log is None else str(self.log)
            self._send(serve={**self._settings, "port": port, "again": True, "log": log})
            self._channel.send(self._first)
            if self._door:
                self._channel.send(self._door)
            if message and (self.log is None or not isinstance(record, _LOGGED)):
                self._channel.send(message)

    def _end(self) -> None:
        """Wait a moment until the port is free."""
        until = time.monotonic() + _END_SECONDS
        with suppress(GoneError):
            while (left := until - time.monotonic()) > 0:
                message = self._channel.receive(left)
                if message is not None and "over" in json.loads(message):
                    break
        self._channel.close()


class Pusher:
    """The rank's end of the pusher. Only its start waits.

    Raises:
        OSError: there can be no such process here.
    """

    def __init__(self) -> None:
        (self._channel,) = Beside("ddpdebug.processes.pusher").channels

    def tell(self, **facts: Any) -> None:
        """Send the process `url`, `token`, `token_file` and `directory`, and later `end`."""
        with suppress(GoneError):
            self._channel.send(json.dumps(facts).encode())

    def hear(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the newest message of the process, after waiting at most `seconds`; empty if there is none."""
        with suppress(GoneError):
            said = json.loads(self._channel.receive(seconds) or b"{}")
            return said if isinstance(said, dict) else {}
        return {}

    def close(self) -> None:
        """Close the connection; a process without a run then ends."""
        self._channel.close()


class HubSink:
    """The sink that has a hub notified of the run, on rank 0 only; added behind the run directory's sink.

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
        """Push the run from its first record on, and report the hub's refusals."""
        match record:
            case RunStarted():
                self._pusher.tell(**self._settings, directory=str(self._directory))
            case RunEnded():
                self._end()
            case Trouble():
                pass  # it may be what was heard
            case _ if self._clock() - self._heard >= _HEAR_SECONDS:
                self._heard = self._clock()
                self._say(self._pusher.hear())

    def close(self) -> None:
        """Release the process, which goes on until the hub has the whole run."""
        self._pusher.close()

    def _end(self) -> None:
        self._say(self._pusher.hear())
        self._pusher.tell(end=True)
        until = self._clock() + _PUSH_SECONDS
        while self._contained and (left := until - self._clock()) > 0:
            said = self._pusher.hear(left)
            self._say(said)
            if not said or "done" in said:
                break
        self._pusher.close()

    def _say(self, said: Mapping[str, Any]) -> None:
        if isinstance(message := said.get("trouble"), str):
            self._tell(Trouble(part="sink:hub waiting", message=message))


def settings_of(config: Config, local_rank: int, avoid: frozenset[int], *, contained: bool) -> dict[str, Any]:
    """Return the settings of the serving process."""
    port = config.metrics_port + (local_rank if config.metrics_port and config.metrics == "per-rank" else 0)
    found = importlib.util.find_spec("prometheus_client")
    packages = "" if found is None or found.origin is None else str(Path(found.origin).parent.parent)
    return {
        "host": config.metrics_host,
        "port": port,
        "again": False,
        "avoid": sorted(avoid),
        "files": serving_of(config).files(),
        "mode": config.metrics,
        "sd_dir": None if config.sd_dir is None else str(config.sd_dir.absolute()),
        "linger": config.linger if is_found(config) else 0.0,
        "push": config.push_outcome,
        "contained": contained,
        "packages": packages,
    }


def serving_of(config: Config) -> Serving:
    """Return the settings of TLS and authentication."""
    return Serving(
        certificate=config.metrics_tls_cert,
        key=config.metrics_tls_key,
        client_ca=config.metrics_client_ca,
        password_file=config.metrics_password_file,
    )


def is_found(config: Config) -> bool:
    """Whether a scraper may still read the endpoint after the run has ended."""
    return config.linger > 0 and (config.sd_dir is not None or config.metrics_port != 0)
