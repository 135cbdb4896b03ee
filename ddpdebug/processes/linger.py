"""The keeper: a small process beside a rank that serves what the rank came to, however it has ended. Torch-free.

A rank that is killed cannot hand over, and one that ends in order must not be kept from it; so the keeper is started
with the rank and sleeps until it has gone. It shares the rank's listening socket, and holds the newest page that the
rank has given it. It is nobody's child, has a session of its own, none of the job's streams, files or variables, and
ends after two scrapes or `--linger` seconds. See docs/decisions/029.

`Keeper` is the rank's side. The other half runs in the process: until the rank has gone it has imported next to
nothing, and wakes up for the rank's messages only.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import struct
import threading
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddpdebug.clock import time

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The processes wait this long at most for each other, seconds.
_PATIENCE = 10.0
#: A keeper that was itself asked to end belongs to something that is being ended: that is not to wait for long.
_WHEN_ASKED = 5.0
#: A request to end concerns the rank that dies so soon after it, seconds: schedulers kill after half a minute.
_ASKED_SECONDS = 120.0
#: Prometheus has seen the end after so many scrapes, which are no two requests of one moment.
_SCRAPES, _APART = 2, 0.5
_MAX_MESSAGE = 1 << 18
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


# --- the rank's side --------------------------------------------------------------------------------------------------


class Keeper:
    """The rank's end of its keeper. Nothing here waits, but for the start of the process.

    Args:
        linger: serve the end for so many seconds at most.
        push: address of a Pushgateway that gets the end too.
        contained: nothing outlives the ranks here: what ends in order takes its target file along by itself.

    Raises:
        OSError: there can be no such process here.
    """

    def __init__(self, linger: float, push: str | None = None, *, contained: bool = False) -> None:
        self._owner, self._lock, self._open = os.getpid(), threading.Lock(), True
        self._lasts = linger > 0 and not contained
        self.lingers = False  # the keeper has the end, the socket and the target file, and takes care of them
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank = -1
        with suppress(OSError, AttributeError):  # an old kernel: the end of the socket tells
            rank = os.pidfd_open(self._owner)
        from ddpdebug.disk import Kept  # noqa: PLC0415 - the other side does without
        from ddpdebug.processes.detached import start  # noqa: PLC0415

        self._kept = Kept(self._socket.fileno())

        words = (theirs.fileno(), rank, self._owner, linger, push or "", contained)
        try:
            start("ddpdebug.processes.linger", words, (theirs.fileno(), rank))
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
            if rank >= 0:
                os.close(rank)

    def tell(self, *, files: tuple[int, ...] = (), **facts: Any) -> bool:
        """Give the keeper facts, which replace those of the same name; return whether it has got them.

        What is too long to be sent at once it does not get, and keeps what it has.

        Args:
            files: with the listening socket, its descriptor.
            facts: `serve` (settings of the endpoint), `page` (all but the state, text format), `labels` (of the state's
                series, text format), `grave` (a code), `sd` (targets), `target` (path and content of the target file),
                `group` (labels by which a Pushgateway groups), `end` (state, outcome, cause and time).
        """
        data = json.dumps(facts).encode()
        if os.getpid() != self._owner or len(data) > _MAX_MESSAGE:  # a forked child may have got the lock closed
            return False
        with self._lock:
            if not (self._open and self._kept):
                self._shut()
                return False
            try:
                more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
                self._socket.sendmsg([data], more, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:  # it is stopped, or the machine is very busy: the next one will do
                return False
            except OSError as error:
                if error.errno == errno.EMSGSIZE:  # more than the system takes at once
                    return False
                self._shut()  # it has gone
                return False
            return True

    def end(self, **facts: Any) -> bool:
        """Give the keeper the end; return whether the endpoint and the target file are its own now."""
        told = self.tell(**facts)
        self.lingers = told and self._lasts
        self._close()
        return self.lingers

    def close(self) -> None:
        """Let go of the keeper; one that was not given the end goes at once."""
        self.tell(quit=True)
        self._close()

    def _close(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        self._open = False
        if self._kept:
            self._socket.close()
        else:  # the script has closed it; what has its number now is the script's
            self._socket.detach()


def ask_to_leave(port: int) -> bool:
    """Let a keeper of this user's leave a port, for a run that is started anew; return whether one did."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(2.0)
        asking.connect(_door(port))
        return not asking.recv(1)
    return False


def _door(port: int) -> str:
    return f"\0ddpdebug-keeper-{os.getuid()}-{port}"  # an abstract address: in the network namespace, like the port


# --- the keeper -------------------------------------------------------------------------------------------------------


class _Asked:
    """The time at which somebody asked this process to end."""

    def __init__(self) -> None:
        self.at = float("-inf")
        asking = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        for number in asking:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asking)  # the job's mask is inherited

    def _note(self, *_: object) -> None:
        self.at = time.monotonic()


def main(words: tuple[int, int, int, float, str, bool]) -> None:
    """Keep the rank's word until it has gone, and serve it for a while; ends the process."""
    control, rank, pid, linger, push, contained = words
    try:
        asked = _Asked()
        facts, listener = _listen(socket.socket(fileno=control), rank)
        if not facts.get("quit") and "labels" in facts and ("end" in facts or _has_gone(rank, pid)):
            if contained and "end" in facts:
                linger = 0.0
            _serve(facts, listener, _Rank(rank, pid), asked, linger, push, contained=contained)
        else:
            _Target(facts.get("target")).remove()
    finally:
        os._exit(0)


def _listen(control: socket.socket, rank: int) -> tuple[dict[str, Any], int]:
    """Return the facts, once the rank has ended, in order or not, and the listening socket, -1 without one."""
    facts: dict[str, Any] = {}
    listener = -1
    control.setblocking(False)
    poll = select.poll()
    for fd in (control.fileno(), rank):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    while not facts.keys() & {"end", "quit"}:
        dead = rank in {fd for fd, _ in poll.poll()}
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
            except BlockingIOError:
                break
            except OSError:
                data, fds = b"", []
            if not data:  # nobody has the other end any more
                return facts, listener
            listener = fds[0] if fds else listener
            facts.update(json.loads(data))
        if dead:  # what it had sent is read; its children may hold the other end still
            break
    return facts, listener


class _Rank:
    """The process that was watched, after its end."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd, self._pid = fd, pid

    def status(self) -> int | None:
        """Return how it has ended, as `waitpid` has it; None where nobody can tell.

        Its parent learns that, and the kernel tells others while the parent has not asked; since Linux 6.15 after that.
        """
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{self._pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
            if fields[0] == "Z":
                return int(fields[49])
        with suppress(OSError, ImportError):
            import fcntl  # noqa: PLC0415

            about = bytearray(64)  # struct pidfd_info; PIDFD_INFO_EXIT is wanted
            struct.pack_into("Q", about, 0, 1 << 3)
            fcntl.ioctl(self._fd, (3 << 30) | (len(about) << 16) | (0xFF << 8) | 11, about)  # PIDFD_GET_INFO
            if struct.unpack_from("Q", about)[0] & (1 << 3):
                return int(struct.unpack_from("i", about, 60)[0])
        return None


def _has_gone(fd: int, pid: int) -> bool:
    """Return whether the rank's process has ended, and not only replaced its program."""
    if fd >= 0:
        poll = select.poll()  # for numbers above 1023 too, which those of the rank may be
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(1000))  # its sockets are closed a moment before
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _serve(
    facts: dict[str, Any],
    listener: int,
    rank: _Rank,
    asked: _Asked,
    linger: float,
    push: str,
    *,
    contained: bool,
) -> None:
    """Serve the end until it was seen, or the time is over."""
    from ddpdebug.schema.run_state import end_without_a_word  # noqa: PLC0415 - not before the rank's end

    known = facts.get("end")
    if known is None:
        recently = time.monotonic() - asked.at < _ASKED_SECONDS
        end = end_without_a_word(rank.status(), asked=recently, gravest=str(facts.get("grave", "")))
        known = [int(end.state), end.outcome, end.cause, time.time()]
    page = (str(facts.get("page", "")) + _state(str(facts.get("labels", "")), *known)).encode()
    pushing = threading.Thread(target=_push, args=(push, facts.get("group", {}), page), daemon=True)
    if push:  # at once: where nothing outlives the ranks there is only their own ending
        pushing.start()
    target = _Target(facts.get("target"))
    if contained and known[1] != "lost":  # this process may be killed at any moment: a file left behind is an alarm
        target.remove()
    try:
        if listener >= 0 and linger > 0:
            _answer(facts, listener, page, target, asked, time.monotonic() + linger)
        elif listener >= 0:
            os.close(listener)
    finally:
        target.remove()
        if push:
            pushing.join(_PATIENCE)


def _state(labels: str, state: int, outcome: str, cause: str, seconds: float) -> str:
    """Return the series of the end, in the text format."""
    rows = (
        ("ddpdebug_run_state", "", state),
        ("ddpdebug_run_outcome_info", f',outcome="{outcome}",cause="{cause}"', 1),
        ("ddpdebug_run_end_timestamp_seconds", "", repr(float(seconds))),
    )
    return "".join(f"# TYPE {name} gauge\n{name}{{{labels}{more}}} {value}\n" for name, more, value in rows)


class _Target:
    """The file by which Prometheus finds the rank, as long as it is the rank's own."""

    def __init__(self, known: Sequence[str] | None) -> None:
        self._path, self._text = (known[0], known[1]) if known else ("", "")

    def _is_own(self) -> bool:
        with open(self._path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib is not loaded
            text: str = file.read(1 << 14)
        return text == self._text

    def moves(self, old: str, new: str) -> bool:
        """Name another address; return whether there is a file to say so."""
        with suppress(OSError):
            if self._path and self._is_own():
                self._text = self._text.replace(json.dumps(old), json.dumps(new))
                other = f"{self._path}.keeper"
                with open(other, "w", encoding="utf-8") as file:  # noqa: PTH123
                    file.write(self._text)
                os.replace(other, self._path)  # noqa: PTH105
                return True
        return False

    def remove(self) -> None:
        """Take the rank off the list, unless another one has its place."""
        with suppress(OSError):
            if self._path and self._is_own():
                os.unlink(self._path)  # noqa: PTH108


def _answer(facts: dict[str, Any], listener: int, page: bytes, target: _Target, asked: _Asked, ending: float) -> None:
    from ddpdebug.sinks.prometheus.server import App, Endpoint, Serving, answer, json_app  # noqa: PLC0415 - it is large

    seen: list[float] = []

    def metrics(_: dict[str, Any], start: Any) -> list[bytes]:
        now = time.monotonic()
        if not seen or now - seen[-1] > _APART:
            seen.append(now)
        return answer(start, "200 OK", page.decode(), [("Content-Type", _TEXT)])

    apps: dict[str, App] = {"/metrics": metrics}
    if "sd" in facts:
        apps["/sd"] = json_app(lambda: facts["sd"])
    host, serving = str(facts["serve"]["host"]), Serving.of(facts["serve"])
    endpoint = Endpoint(apps, host, 0, serving, listener=socket.socket(fileno=listener))
    begun, door = time.monotonic(), _listen_for_heirs(endpoint.port)
    while True:
        now = time.monotonic()
        end = min(ending, max(asked.at, begun) + _WHEN_ASKED) if now - asked.at < _ASKED_SECONDS else ending
        if now >= end or (len(seen) >= _SCRAPES and now - seen[-1] > _APART):
            break
        if not select.select(door, [], [], min(_APART, end - now))[0]:
            continue
        heir, old = door[0].accept()[0], endpoint.address
        with heir:  # a new run wants the port, and waits until this ends
            door.pop().close()
            endpoint.close()
            endpoint = Endpoint(apps, host, 0, serving)
            if not target.moves(old, endpoint.address):
                break
    endpoint.close()


def _listen_for_heirs(port: int) -> list[socket.socket]:
    """Return the socket at which a run that wants the port asks for it; none where another keeper has that."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(_door(port))
        door.listen(1)
    except OSError:
        door.close()
        return []
    return [door]


def _push(address: str, group: dict[str, str], page: bytes) -> None:
    """Put the end to a Pushgateway; one that does not answer is left alone."""
    import urllib.parse  # noqa: PLC0415 - not before the rank's end
    import urllib.request  # noqa: PLC0415

    words = "".join(f"/{name}/{urllib.parse.quote(value, safe='')}" for name, value in group.items())
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked where the option is read
        f"{address.rstrip('/')}/metrics/job/ddpdebug{words}", page, {"Content-Type": _TEXT}, method="PUT"
    )
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=_PATIENCE):  # noqa: S310
        pass
