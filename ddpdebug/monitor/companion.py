"""The rank's interface to its companion process, which runs the rules; the rules run here if there is none.

Nothing here waits for long: a reply that does not come at once is taken in a later tick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddpdebug.clock import time
from ddpdebug.companion.calls import dumped, json_of_step
from ddpdebug.monitor.served import Host
from ddpdebug.processes.beside import GoneError
from ddpdebug.schema.announcements import Announcement
from ddpdebug.schema.finding import Finding, strict
from ddpdebug.schema.requests import Request
from ddpdebug.schema.step import Step
from ddpdebug.schema.wire import to_json

#: A tick waits so long for a reply; what must be known at once, and the end, wait longer.
_IN_A_TICK, _AT_THE_END = 0.02, 10.0
#: One that does not answer for so long is left, as one that has died.
_PATIENCE = 30.0
#: So often another one is started in the place of one that has died.
_STARTS = 5


@dataclass(slots=True)
class Reply:
    """The results of calls to the companion.

    Args:
        found: findings, each with whether it is new.
        asks: what the ranks are asked.
        curious: rules that want to see the rows of all ranks.
    """

    found: list[tuple[Finding, bool]] = field(default_factory=list)
    asks: list[Request] = field(default_factory=list)
    curious: list[str] = field(default_factory=list)


class _Way(Protocol):
    """A way to the rules."""

    def send(self, message: bytes) -> None: ...
    def receive(self, seconds: float) -> bytes | None: ...
    def close(self) -> None: ...


class _Here:
    """The rules in this process."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        from ddpdebug.companion.judge import Judge  # noqa: PLC0415 - a rank loads the rules where it has no companion

        self._judge, self._answer = Judge(begin), b""

    def send(self, message: bytes) -> None:
        """Judge at once."""
        self._answer = dumped(self._judge.reply(json.loads(message)["calls"]))

    def receive(self, seconds: float) -> bytes | None:
        """Return the answer."""
        del seconds
        return self._answer

    def close(self) -> None:
        """Do nothing."""


class Companion:
    """Sends steps and announcements to the rules and returns their findings; starts the process on first use.

    Args:
        begin: what it must know: `world` and `config`.
        log: the run directory, where all that was said so far can be read again.
        known: the findings so far.
        trouble: takes what goes wrong.
        start: starts the process.
    """

    def __init__(
        self,
        begin: Mapping[str, Any],
        log: Callable[[], Path | None],
        known: Callable[[], Sequence[Finding]],
        trouble: Callable[[str, str], object],
        start: Callable[[], _Way] | None = None,
    ) -> None:
        self._host = Host()  # of its own, unless it is given the way
        self._start = start or self._host.judge
        self._begin, self._log, self._known, self._trouble = dict(strict(begin)), log, known, trouble
        self._way: _Way | None = None
        self._starts = 0
        self._calls: list[bytes] = []
        self._sent: list[bytes] = []  # that have no reply yet
        self._since = 0.0  # when these were sent
        self._from: Path | None = None  # from whose records the next one goes on
        self._succeeds = False  # it judges in the place of another rank: what it is told stands in no log
        self._later = Reply()  # what came of calls as it was not asked for
        self._ids = set[str | None]()  # of findings that were returned
        self._judges_on = self._waits = False  # steps wait for answers; ticks without anything count
        #: In this process, whatever is possible.
        self.here = not sys.platform.startswith("linux")

    @property
    def busy(self) -> bool:
        """Whether a reply of the companion or an answer of the ranks is pending."""
        return bool(self._sent) or self._judges_on

    # --- what it is told ----------------------------------------------------------------------------------------------

    def feed(self, step: Step) -> None:
        """Send the next step to the rules."""
        self._say("step", json_of_step(step))

    def answer(self, rank: int, optimizer: int, step: int, kind: str, value: Any, last: bool) -> None:  # noqa: FBT001 - as in JSON
        """Send a rank's detail to the rules; None if the rank has none."""
        self._say("detail", rank, optimizer, step, kind, value, last)

    def tell(self, topic: str, rank: int, announcement: Announcement | None) -> None:
        """Send an announcement to the rules; None stands for a malformed one."""
        self._say("fact", topic, rank, to_json(announcement))

    def meet(self) -> None:
        """Discard the announcements of all ranks, which announce anew."""
        self._say("meet")

    def go_on(self) -> None:
        """Continue the judging of another rank, from its run directory, or else from its findings."""
        self._from, self._succeeds = self._log(), True
        self._ids.update([finding.id for finding in self._known()])
        if self._from is None or self._way is not None:
            self._adopt()

    def _adopt(self) -> None:
        self._calls.insert(0, dumped(("adopt", [finding.to_json() for finding in self._known()])))

    def _say(self, *call: Any) -> None:
        self._calls.append(dumped(call))

    # --- what it answers ----------------------------------------------------------------------------------------------

    def tick(self) -> Reply:
        """Return the results that have arrived by now."""
        reply, self._later = self._later, Reply()
        until = time.monotonic() + _IN_A_TICK
        self._hear(reply, until)
        if not self._sent and (self._calls or self._waits):
            self._say("tick")
            self._send()
            self._hear(reply, until)
        return reply

    def curious(self, step: Step) -> list[str]:
        """Return the rules that want the rows of all ranks for a step, if they answer at once."""
        reply = self.tick()
        if not self._sent:
            self._say("curious", json_of_step(step))
            self._send()
            self._hear(reply, time.monotonic() + _IN_A_TICK)
        self._later.found += reply.found
        self._later.asks += reply.asks
        return reply.curious

    def news(self) -> Reply:
        """Return the findings from announcements so far, without judging a step."""
        return self._at_once("news")

    def wait(self) -> Reply:
        """Wait for the results of all calls so far."""
        return self._at_once("tick")

    def finish(self) -> Reply:
        """Wait for the remaining results, with the findings that only the end of a run shows."""
        return self._at_once("finish")

    def close(self) -> None:
        """Close the connection to the companion and release its process."""
        if self._way is not None:
            self._way.close()
            self._way = None
        self._host.close()

    def _at_once(self, *call: Any) -> Reply:
        """Return what comes of a call now, by the rules in this process if need be."""
        reply, self._later = self._later, Reply()
        if self._way is None and not (self._calls or self._sent or self._waits):
            return reply  # nothing was said that another rank has not judged
        for _ in range(2):
            until = time.monotonic() + _AT_THE_END
            self._hear(reply, until)
            if not self._sent:
                self._say(*call)
                self._send()
                self._hear(reply, until)
                if self._is_answered:
                    break
            if self._sent:
                self._leave(f"no answer in {_AT_THE_END:g} s", slow=True)
            self.here = True
            if self._succeeds and self._from is not None:  # the rank's own thread reads no log of others
                self._from = None
                self._adopt()
        return reply

    @property
    def _is_answered(self) -> bool:
        return self._way is not None and not self._sent

    def _send(self) -> None:
        first = b"" if self._way is not None else b'"begin":' + dumped(self._open()) + b","
        assert self._way is not None
        self._sent, self._calls, self._since = self._calls, [], time.monotonic()
        with suppress(GoneError):  # it is seen where the answer is looked for
            self._way.send(b"{" + first + b'"calls":[' + b",".join(self._sent) + b"]}")

    def _open(self) -> dict[str, Any]:
        """Make a way to the rules; return what is said first on it."""
        begin = {**self._begin, "directory": None if self._from is None else str(self._from)}
        if not self.here and self._starts < _STARTS:
            self._starts += 1
            try:
                self._way = self._start()
            except Exception as error:  # noqa: BLE001 - an audit hook of the script's may refuse it
                self._trouble("companion", f"the rules judge in the process of rank 0, and in none beside it: {error}")
        if self._way is None:
            self.here, self._way = True, _Here(begin)
        return begin

    def _hear(self, reply: Reply, until: float) -> None:
        """Take the answer that is awaited, if it comes by then."""
        if not self._sent or self._way is None:
            return
        try:
            answer = self._way.receive(until - time.monotonic())
        except GoneError as error:
            self._leave(str(error))
            return
        if answer is not None:
            self._sent = []
            self._take(json.loads(answer), reply)
        elif time.monotonic() - self._since > _PATIENCE:
            self._leave(f"no answer in {_PATIENCE:g} s", slow=True)

    def _leave(self, why: str, *, slow: bool = False) -> None:
        """Go on with another one, which reads what this one has known, or begins with what is not judged yet.

        After one that was slow to read it, nobody does.
        """
        self.close()
        self._way, self._from = None, None if slow and self._from is not None else self._log()
        self._calls, self._sent = [*self._sent, *self._calls] if self._from is None or self._succeeds else [], []
        if self._from is None:
            self._adopt()
        self._waits = True  # it is to be asked
        self._trouble("companion", f"the process in which the rules judge is started again: {why}")

    def _take(self, said: Mapping[str, Any], reply: Reply) -> None:
        if "failed" in said:
            raise RuntimeError(said["failed"])
        for text, new in said["found"]:
            finding = Finding.from_json(text)
            reply.found.append((finding, new and finding.id not in self._ids))
            self._ids.add(finding.id)
        for optimizer, step, kind, last, ranks in said["asks"]:
            asked = Request(optimizer=optimizer, step=step, kind=kind, last=last, ranks=frozenset(ranks))
            reply.asks.append(asked)
        reply.curious += said["curious"]
        self._judges_on, self._waits = said["busy"], said["waits"]
        for part, message in said["troubles"]:
            self._trouble(part, message)
