"""The metrics server for the ranks of a node, in the companion of the first: it takes their records and is scraped.

It outlives a rank, however that ends, until its end was scraped twice or for `--linger` seconds; see
docs/decisions/029.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdebug.clock import time
from ddpdebug.companion.calls import dumped, record_of_json
from ddpdebug.companion.owner import Asked, Owner
from ddpdebug.errors import text_of
from ddpdebug.isolation.background import Thread
from ddpdebug.processes.beside import Channel, GoneError, open_door
from ddpdebug.schema.run_state import end_of, end_without_a_word
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus.listening import Serving, address_of, ask_to_leave, listen, listen_for_heirs

if TYPE_CHECKING:
    from ddpdebug.sinks.prometheus.discovery import Discovery
    from ddpdebug.sinks.prometheus.exporter import PrometheusSink

#: One that was itself asked to end belongs to something that is being ended: that is not to wait for long, seconds.
_WHEN_ASKED = 5.0
#: A request to end concerns the rank that dies so soon after it, seconds: schedulers kill after half a minute.
_ASKED_SECONDS = 120.0
#: Who comes later than the first rank is given so many steps that it has missed.
_FIRST_STEPS = 64
#: Prometheus has seen the end after so many scrapes.
_SCRAPES = 2
#: A Pushgateway may take so long; what served before at a port, until it has left it.
_PATIENCE = 10.0


class House:
    """The ranks of the node that are served in this process. The last one ends the process."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self._lock = asked, threading.Lock()
        self._speakers = list[Speaker]()
        self._first = deque[StepJudged](maxlen=_FIRST_STEPS)
        self._door: socket.socket | None = None
        self.leads: int | None = None  # the rank whose steps are those of all

    def take(self, channel: Channel, owner: Owner) -> None:
        """Serve a rank."""
        with self._lock:
            self._speakers.append(Speaker(self, channel, owner))

    def open(self, name: str, rank: int) -> None:
        """Open the door for other ranks of the node, of the same user and with the same steps."""
        self.leads, self._door = rank, open_door(name)
        if self._door is not None:
            Thread("ddpdebug-door", self._let_in, self._door)

    def _let_in(self, door: socket.socket) -> None:
        while True:
            end = door.accept()[0]  # raises where the door is closed
            pid, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                end.close()
                continue
            descriptor = -1
            with suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(pid)
            self.take(Channel(end), Owner(descriptor, pid))

    def share(self, record: StepJudged, by: Speaker) -> None:
        """Pass a step to all ranks that have the same steps."""
        with self._lock:
            self._first.append(record)
            others = [each for each in self._speakers if each is not by]
        for each in others:
            each.hear(record)

    def missed(self) -> list[StepJudged]:
        """Return the first steps, for a rank that has come later."""
        with self._lock:
            return [*self._first] if len(self._first) < _FIRST_STEPS else []

    def leave(self, speaker: Speaker) -> None:
        """Remove a rank and end with the last one; no rank is added once the first is gone."""
        with self._lock:
            if speaker is self._speakers[0] and self._door is not None:
                with suppress(OSError):
                    self._door.shutdown(socket.SHUT_RDWR)  # wakes who accepts
                self._door.close()
            self._speakers.remove(speaker)
            if not self._speakers:
                os._exit(0)
            if speaker.rank == self.leads:
                self.leads = None
                for each in self._speakers:
                    each.lead(None)


class Speaker:
    """The server of one rank: reads its records in a thread of its own.

    Args:
        channel: where the records come from; the address goes back.
        owner: the rank's process.
    """

    def __init__(self, house: House, channel: Channel, owner: Owner) -> None:
        self._house, self._channel, self._owner, self._asked = house, channel, owner, house.asked
        self._settings: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._sink: PrometheusSink | None = None
        self._discovery: Discovery | None = None
        self._ended: RunEnded | None = None
        self.rank: int | None = None
        # steps that were taken before the rank's own come: all up to these, by optimizer, and single ones
        self._newest, self._given = dict[int, int](), set[tuple[int, int]]()
        self._writing = threading.Lock()
        Thread("ddpdebug-speaker", self._run)

    def hear(self, record: StepJudged) -> None:
        """Take a step that another rank of the node has sent for all."""
        try:
            with self._writing:
                if self._sink is not None and self._ended is None:
                    self._take_step(self._sink, record)
        except Exception as error:  # noqa: BLE001 - the other ranks go on
            self._fail(error)

    def lead(self, rank: int | None) -> None:
        """Send the rank whose steps stand for those of all."""
        self._reply({"leads": rank})

    def _take_step(self, sink: PrometheusSink, record: StepJudged) -> None:
        """Take a step, which may come from several sides, once."""
        place = record.step.optimizer, record.step.step
        if place not in self._given and place[1] > self._newest.get(place[0], -1):
            sink.write(record)

    def _fail(self, error: Exception) -> None:
        self._reply({"trouble": ["sink:prometheus", text_of(error)]})
        self._drop()

    def _run(self) -> None:
        """Serve until the end was seen."""
        try:
            with suppress(GoneError):
                while self._ended is None:
                    message = json.loads(self._channel.receive(None, self._owner.descriptor) or b"{}")
                    try:
                        self._take(message)
                    except Exception as error:  # noqa: BLE001 - the rules go on, and the other ranks
                        self._fail(error)
            if self._sink is not None and (self._ended is not None or self._owner.has_gone()):
                self._serve_end(self._sink)
        finally:
            self._drop()
            if self._listener is not None:
                self._listener.close()
            self._house.leave(self)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "serve" in message:
            self._listen(message["serve"])
        elif "door" in message:
            self._house.open(message["door"], message["rank"])
        elif "record" in message:
            self._write(record_of_json(message["record"]))

    def _drop(self) -> None:
        """Serve nothing any more."""
        for each in (self._sink, self._discovery):
            if each is not None:
                each.close()
        self._sink = self._discovery = None

    def _listen(self, settings: dict[str, Any]) -> None:
        """Take a port, say which, and load what serves there."""
        self._settings = settings
        serving, until = self._serving(), time.monotonic() + _PATIENCE
        try:
            scheme = "http" if serving.context() is None else "https"
            serving.credentials()
            while self._listener is None:
                self._listener = listen(settings["host"], settings["port"], serving)
                if (
                    settings["again"]
                    and self._listener.getsockname()[1] != settings["port"]
                    and time.monotonic() < until
                ):
                    self._listener.close()  # it is left in a moment, by the process in whose place this one is
                    self._listener = None
                    time.sleep(0.05)
        except OSError as error:
            self._reply({"failed": [error.errno or errno.EIO, error.strerror or str(error)]})
            return
        address = address_of(settings["host"], self._listener.getsockname()[1])
        self._reply({"url": f"{scheme}://{address}/metrics", "leads": self._house.leads})
        sys.path.append(settings["packages"])
        import ddpdebug.sinks.prometheus.exporter  # noqa: F401, PLC0415 - it is large

    def _reply(self, message: Mapping[str, Any]) -> None:
        with suppress(GoneError):  # what it has said before is heard
            self._channel.send(dumped(message))

    def _serving(self) -> Serving:
        every = (lambda: None) if self._discovery is None else self._discovery.keep
        avoid = frozenset(self._settings["avoid"])
        return dataclasses.replace(Serving.of(self._settings["files"]), avoid=avoid, ask=ask_to_leave, every=every)

    def _write(self, record: Record) -> None:
        if isinstance(record, RunEnded):
            self._ended = record
            return
        if isinstance(record, RunStarted):
            self._open(record)
        elif self._sink is not None:
            with self._writing:
                if isinstance(record, StepJudged):
                    self._take_step(self._sink, record)
                else:
                    self._sink.write(record)
            if isinstance(record, StepJudged) and self._house.leads == self.rank:
                self._house.share(record, self)

    def _open(self, record: RunStarted) -> None:
        from ddpdebug.sinks.prometheus.discovery import Discovery  # noqa: PLC0415
        from ddpdebug.sinks.prometheus.exporter import PrometheusSink  # noqa: PLC0415

        settings = self._settings
        if settings["sd_dir"] is not None:
            self._discovery = Discovery(Path(settings["sd_dir"]))
        sink = PrometheusSink(record.rank, settings["host"], mode=settings["mode"], serving=self._serving())
        self.rank = record.rank
        sink.write(record)
        if settings["again"] and settings["log"] is not None:
            self._catch_up(sink, Path(settings["log"]))
        sink.serve(self._listener)
        with self._writing:
            for step in self._house.missed():
                self._take_step(sink, step)
                self._given.add((step.step.optimizer, step.step.step))
            self._sink = sink
        try:
            if self._discovery is not None:
                self._discovery.write(record)
        except OSError as error:
            self._discovery = None
            self._reply({"trouble": ["sink:discovery", text_of(error)]})

    def _catch_up(self, sink: PrometheusSink, directory: Path) -> None:
        """Take what a process before this one had taken, from the run directory."""
        from ddpdebug.run_directory.reader import read_findings, read_observations, read_steps  # noqa: PLC0415

        with suppress(OSError, ValueError):
            for step in read_steps(directory):
                steps = step.step - self._newest.get(step.optimizer, step.step - 1)
                self._newest[step.optimizer] = step.step
                sink.write(StepJudged(step=step, steps=steps))
            for one in read_observations(directory):
                if one.kind in {"fact", "detail"}:
                    sink.write(Saved(kind=one.kind, payload=one.payload))
            for finding in read_findings(directory):
                sink.write(FindingRaised(finding=finding))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _serve_end(self, sink: PrometheusSink) -> None:
        """Serve the end until it was seen, or the time is over."""
        settings, ended = self._settings, self._ended
        if ended is not None:
            end = end_of(ended.reason, ended.exit_code, gravest=sink.gravest)
        else:
            asked = time.monotonic() - self._asked.at < _ASKED_SECONDS
            end = end_without_a_word(self._owner.status(), asked=asked, gravest=sink.gravest)
        sink.end(end)
        in_order = ended is not None and settings["contained"]
        linger = 0.0 if in_order else settings["linger"]
        pushing = None
        if settings["push"]:  # at once: where nothing outlives the ranks there is only their own ending
            pushing = Thread("ddpdebug-push", _push, settings["push"], sink.group, sink.page())
        if settings["contained"] and end.outcome != "lost" and self._discovery is not None:
            self._discovery.close()  # this process may be killed at any moment: a file left behind is an alarm
        if linger > 0:
            self._wait_for_scrapes(sink, time.monotonic() + linger)
        sink.close()
        if self._discovery is not None:
            self._discovery.close()
        self._say_over()
        if pushing is not None:
            pushing.join(_PATIENCE)

    def _say_over(self) -> None:
        """Answer that the port is free, or is left to who asks for it."""
        self._reply({"over": True})

    def _wait_for_scrapes(self, sink: PrometheusSink, ending: float) -> None:
        from ddpdebug.sinks.prometheus.exporter import APART  # noqa: PLC0415

        begun, door = time.monotonic(), listen_for_heirs(sink.port)
        self._say_over()
        while True:
            now, asked = time.monotonic(), self._asked.at
            end = min(ending, max(asked, begun) + _WHEN_ASKED) if now - asked < _ASKED_SECONDS else ending
            if now >= end or (sink.scrapes >= _SCRAPES and now - sink.scraped > APART):
                return
            if not select.select(door, [], [], min(APART, end - now))[0]:
                continue
            heir = door[0].accept()[0]
            with heir:  # a new run wants the port, and waits until this ends
                door.pop().close()
                address = sink.move()
                if self._discovery is None or not self._discovery.move(address):
                    return


def _push(address: str, group: Mapping[str, str], page: bytes) -> None:
    """Put the end to a Pushgateway; one that does not answer is left alone."""
    import urllib.parse  # noqa: PLC0415 - not before the rank's end
    import urllib.request  # noqa: PLC0415

    from ddpdebug.sinks.prometheus.exposition import TEXT  # noqa: PLC0415

    words = "".join(f"/{name}/{urllib.parse.quote(value, safe='')}" for name, value in group.items())
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked where the option is read
        f"{address.rstrip('/')}/metrics/job/ddpdebug{words}", page, {"Content-Type": TEXT}, method="PUT"
    )
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=_PATIENCE):  # noqa: S310
        pass
