"""Sends each new finding to Grafana as an annotation, from a thread of its own. Torch-free.

Nothing waits for Grafana. While it does not answer, or answers that something is wrong with it, findings wait in their
order and are tried again, ever less often; whatever it has not taken when the job ends is left for
`ddpdebug annotations flush`. For that the run directory has all that is needed: the findings are there anyway, and
`annotations.jsonl` marks those that were sent. The token is never written down.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote

from ddpdebug.clock import time
from ddpdebug.disk import Disk, Kept, moved_up
from ddpdebug.errors import UsageError
from ddpdebug.grafana.client import Grafana, GrafanaError
from ddpdebug.isolation.background import Thread
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, Trouble
from ddpdebug.sinks.text import clean, counted, where

#: Findings wait in memory up to so many; later ones are left for `flush`.
_WAITING = 1000
#: Seconds between two tries, doubled after each; the most that Grafana may ask for.
_PAUSE, _LONGEST_PAUSE, _LONGEST_WISH = 0.5, 60.0, 600.0
#: After so many seconds without an answer that is said; at once, where Grafana refuses who asks.
_SILENCE, _REFUSALS = 60.0, 3
_CLOSE_SECONDS = 2.0
_MAX_RANKS = 8
_MAX_SENT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What Grafana is told of a finding; `incident` is its name there, the same however often it is sent."""

    finding: str  # its id
    incident: str
    text: str
    tags: tuple[str, ...]
    milliseconds: int  # since the epoch

    @classmethod
    def of(cls, finding: Finding, run_id: str, world: int, now: float = 0.0) -> Annotation:
        """Make it of a finding; `now`, in seconds since the epoch, is for one that does not know its time."""
        ranks = [f"rank:{rank}" for rank in finding.ranks[:_MAX_RANKS]]
        tags = (f"run:{run_id}", f"code:{finding.code}", f"severity:{finding.severity.label}", *ranks)
        what = clean(finding.subject[0], 160) if finding.subject else ""
        lines = [f"{finding.code}: {clean(finding.title, 200)}", where(finding, world), what]
        text = "\n".join(filter(None, [*lines, f"ddpdebug explain {finding.code}"]))
        with suppress(ValueError, TypeError):
            now = datetime.fromisoformat(finding.time or "").timestamp()
        name = finding.id or finding.code
        return cls(finding=name, incident=f"{run_id}/{name}", text=text, tags=tags, milliseconds=round(1000 * now))

    def send(self, grafana: Grafana) -> bool:
        """Send it unless it is there; tell whether it was sent, raise what the client raises."""
        return grafana.annotate(self.incident, self.text, self.tags, self.milliseconds)


class Sent:
    """The marks of what was sent; for one process at a time.

    Args:
        path: of the file that has them.

    Raises:
        BlockingIOError: another process sends the findings of this run.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._owner = os.getpid()
        self._file = Kept(moved_up(disk.descriptor(path, os.O_WRONLY | os.O_APPEND)))
        try:
            fcntl.lockf(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        except OSError:  # a file system without locks
            pass

    def mark(self, annotation: Annotation) -> None:
        """Write that one was sent; a mark that is lost costs a question to Grafana later."""
        if os.getpid() == self._owner:
            self._file.write(json.dumps({"sent": annotation.finding}).encode() + b"\n")

    def close(self) -> None:
        """Let others send."""
        self._file.close()


def sent_before(path: Path) -> set[str]:
    """Return the ids of the findings that are marked as sent; what cannot be read was not."""
    found = set()
    with suppress(OSError), path.open("rb") as file:
        for line in file.read(_MAX_SENT).splitlines():
            with suppress(ValueError, TypeError, LookupError):
                found.add(str(json.loads(line)["sent"]))
    return found


class Courier:
    """Sends annotations one after the other, and waits as long as Grafana needs.

    Args:
        connect: makes the client; may raise.
        pause: waits for so many seconds, and tells whether to stop.
        failed: called after each try that failed, with the error and how often in a row.
    """

    def __init__(
        self,
        connect: Callable[[], Grafana],
        pause: Callable[[float], bool],
        failed: Callable[[Exception, int], None] = lambda _error, _times: None,
    ) -> None:
        self._connect, self._pause, self._failed = connect, pause, failed
        self._grafana: Grafana | None = None

    def deliver(self, annotation: Annotation) -> bool | None:
        """Send one and return whether Grafana did not have it; None when told to stop before it was taken.

        Raises:
            UsageError: nothing can be sent, now or later.
            GrafanaError: Grafana does not want this one.
        """
        times = 0
        while True:
            try:
                self._grafana = self._grafana or self._connect()
                return annotation.send(self._grafana)
            except UsageError:
                raise
            except Exception as error:
                if isinstance(error, GrafanaError) and error.about_content:
                    raise
                times += 1
                self._grafana = None  # the token may have been replaced
                wish = error.retry_after if isinstance(error, GrafanaError) else 0.0
                self._failed(error, times)
                seconds = min(_LONGEST_PAUSE, _PAUSE * 2 ** min(times - 1, 10))
                if self._pause(max(seconds, min(wish, _LONGEST_WISH))):
                    return None


class Annotations:
    """The sink that makes a Grafana annotation of each new finding, on rank 0 only.

    Args:
        connect: makes the client; called in the sink's thread, may raise.
        marks: the file that marks what was sent; without one nothing does.
        tell: called with a `Trouble` when Grafana takes nothing.
    """

    part = "annotations"  # what messages call it

    def __init__(
        self,
        connect: Callable[[], Grafana],
        marks: Path | None = None,
        *,
        disk: Disk | None = None,
        tell: Callable[[Trouble], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._marks, self._disk, self._tell, self._clock = marks, disk or Disk(), tell, clock
        self._run_id, self._world = "", 1
        self._shown: Path | None = None  # the run directory
        self._waiting: deque[Annotation] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._sent: Sent | None = None
        self._courier = Courier(connect, self._closing.wait, self._note)
        self._lost = self._error = ""  # why nothing can be sent at all; the newest error
        self._failing_since: float | None = None
        self._tried = time.monotonic()  # when the one that is on its way was first tried
        self._said = False
        self._left = self._refused = 0
        self._thread = Thread("ddpdebug-annotations", self._send_all)

    def write(self, record: Record) -> None:
        """Queue a new finding, and say at the end what was not sent; raise OSError where nothing can be sent."""
        if self._lost:
            raise OSError(self._unsent())
        match record:
            case RunStarted():
                self._run_id, self._world, self._shown = record.run_id, record.world, record.directory
                with suppress(OSError):
                    self._sent = None if self._marks is None else Sent(self._marks, self._disk)
            case FindingRaised() if record.new:
                with self._changed:
                    if self._left or len(self._waiting) >= _WAITING:  # later ones wait too: the order is kept
                        self._left += 1
                    else:
                        self._waiting.append(
                            Annotation.of(record.finding, self._run_id, self._world, now=self._clock())
                        )
                    self._changed.notify_all()
            case RunEnded():
                self.close()
                if self.unsent:
                    self._tell(Trouble(part="sink:annotations waiting", message=self._unsent()))

    @property
    def unsent(self) -> int:
        """How many findings Grafana has not taken."""
        return len(self._waiting) + self._left + self._refused

    def close(self) -> None:
        """Give what is on its way two seconds since it left; none where Grafana did not answer before."""
        with self._changed:
            if self._thread.is_alive():  # it is not in a forked child
                seconds = max(0.0, _CLOSE_SECONDS - (time.monotonic() - self._tried))
                self._changed.wait_for(lambda: not self._waiting or self._is_stuck, seconds)
            self._closing.set()
            self._changed.notify_all()
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.close()

    @property
    def _is_stuck(self) -> bool:
        return bool(self._lost) or self._failing_since is not None

    def _send_all(self) -> None:
        while (annotation := self._next()) is not None:
            try:
                if self._courier.deliver(annotation) is None:
                    return
            except UsageError as error:
                with self._changed:
                    self._lost = _words(error)
                    self._changed.notify_all()
                return
            except GrafanaError as error:
                self._error = _words(error)
                self._refused += 1
            else:
                self._mark(annotation)
            with self._changed:
                self._waiting.popleft()
                self._failing_since = None
                self._changed.notify_all()

    def _next(self) -> Annotation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            self._tried = time.monotonic()
            return self._waiting[0] if self._waiting else None

    def _mark(self, annotation: Annotation) -> None:
        with suppress(OSError, ValueError):  # the disk is full, or the run has ended
            if (sent := self._sent) is not None:
                sent.mark(annotation)

    def _note(self, error: Exception, times: int) -> None:
        """Keep the error of a try that failed, and say it where it lasts or will not pass by itself."""
        now = time.monotonic()
        with self._changed:
            self._error = _words(error)
            since = self._failing_since = now if self._failing_since is None else self._failing_since
            self._changed.notify_all()
        refused = isinstance(error, GrafanaError) and error.about_us and times >= _REFUSALS
        if not self._said and not self._closing.is_set() and (refused or now - since >= _SILENCE):
            self._said = True
            message = f"Grafana takes no annotations: {self._error}; findings wait, and are sent once it does"
            self._tell(Trouble(part="sink:annotations waiting", message=message))

    def _unsent(self) -> str:
        again = "" if self._shown is None else f"; to send later: ddpdebug annotations flush {quote(str(self._shown))}"
        why = self._lost or self._error or "the job ended first"
        return f"{counted(self.unsent, 'finding')} not sent to Grafana{again} ({why})"


def _words(error: Exception) -> str:
    return clean(f"{type(error).__name__}: {error}", 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What came of sending what a run has left: counts, and why the rest was not taken."""

    sent: int = 0
    there: int = 0
    refused: int = 0
    left: int = 0
    error: str = ""


def flush(
    findings: Iterable[Finding],
    run_id: str,
    world: int,
    sent: Sent,
    known: Iterable[str],
    courier: Courier,
    default: float = 0.0,
) -> Flushed:
    """Send the findings of a run that are not marked as sent, in their order, until Grafana takes no more.

    Args:
        known: ids that are marked as sent.
        default: time of a finding that does not know its own, seconds since the epoch.
    """
    marked = set(known)
    waiting = [one for each in findings if (one := Annotation.of(each, run_id, world, default)).finding not in marked]
    new = there = refused = 0
    error = ""
    for place, annotation in enumerate(waiting):
        try:
            taken = courier.deliver(annotation)
        except GrafanaError as failure:
            refused, error = refused + 1, str(failure)
            continue
        if taken is None:
            return Flushed(sent=new, there=there, refused=refused, left=len(waiting) - place, error=error)
        with suppress(OSError):
            sent.mark(annotation)
        new, there = new + taken, there + (not taken)
    return Flushed(sent=new, there=there, refused=refused, error=error)
