"""A process of ddpdebug beside this one, and the connections to it: messages of any length. Torch-free.

Nothing here holds up the job: what cannot be sent now goes with what follows. A script may close what it has not
opened, and fork: the connection is used by the process that has it, and as long as its number leads to it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress
from typing import Any

from ddpdebug.clock import time
from ddpdebug.disk import Kept, socket_up
from ddpdebug.processes import detached

#: Begins a message: its length.
_HEAD = struct.Struct("<I")


class GoneError(Exception):
    """The other process does not answer any more."""


class Channel:
    """One end of a connection; for one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._owner, self._socket = os.getpid(), socket_up(end)
        self._kept = Kept(self._socket.fileno())
        self._out, self._in = bytearray(), bytearray()
        self.gone = False  # the other side has, or this one was closed
        self._socket.setblocking(False)

    def send(self, message: bytes) -> None:
        """Send a message; any part that does not fit now goes with the next call.

        Raises:
            GoneError: the other side has gone.
        """
        self._out += _HEAD.pack(len(message)) + message
        self._push()

    def receive(self, seconds: float | None = 0.0, process: int = -1) -> bytes | None:
        """Return the next message, after waiting at most `seconds`; None if none has come.

        Args:
            process: descriptor of the process on the other side, whose children may have the connection open.

        Raises:
            GoneError: there are no more messages, and the other side has gone.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self._push()
            if (message := self._taken()) is not None:
                return message
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            if process >= 0:
                poll.register(process, select.POLLIN)
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(None if left is None else left * 1000)}
            if not ready:
                return None
            if self._socket.fileno() not in ready:
                self._end("its process has ended")
            self._pull()

    @property
    def behind(self) -> int:
        """The number of bytes that are not sent yet."""
        return len(self._out)

    def flush(self, seconds: float) -> None:
        """Wait at most `seconds` until everything is sent."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._out and (left := until - time.monotonic()) > 0:
            poll.poll(min(left, 1.0) * 1000)
            self._push()

    def close(self) -> None:
        """Close the connection."""
        if self._socket.fileno() < 0 or os.getpid() != self._owner:
            return
        self.gone = True
        if self._kept:
            self._socket.close()
        else:  # the script has closed it; what has its number now is the script's
            self._socket.detach()

    def _end(self, why: str) -> None:
        self.gone = True
        raise GoneError(why)

    def _push(self) -> None:
        self._check()
        with suppress(BlockingIOError):
            while self._out:
                try:
                    sent = self._socket.send(self._out, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    raise
                except OSError as error:
                    self._out.clear()  # what it has said before can still be heard
                    self._end(str(error))
                del self._out[:sent]

    def _pull(self) -> None:
        self._check()
        with suppress(BlockingIOError):
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                raise
            except OSError as error:
                self._end(str(error))
            if not data:
                self._end("its process has ended")
            self._in += data

    def _taken(self) -> bytes | None:
        if len(self._in) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._in)[0]
        if len(self._in) < end:
            return None
        message = bytes(self._in[_HEAD.size : end])
        del self._in[:end]
        return message

    def _check(self) -> None:
        if self._socket.fileno() < 0:
            self._end("it was let go")
        if os.getpid() != self._owner or not self._kept:
            self._end("the script has closed the connection")


class Beside:
    """A process beside this one: calls `main` of a module with its ends of the connections and our descriptor.

    Args:
        words: what it is told besides.
        channels: how many connections there are.

    Raises:
        OSError: there can be no such process.
    """

    def __init__(self, module: str, *words: Any, channels: int = 1) -> None:
        mine, theirs, own = list[socket.socket](), list[socket.socket](), -1
        try:
            for _ in range(channels):
                for ends, end in zip((mine, theirs), socket.socketpair(), strict=True):
                    ends.append(end)
            with suppress(OSError, AttributeError):  # an old kernel: the end of the connection shows it
                own = os.pidfd_open(os.getpid())
            files = (*(end.fileno() for end in theirs), own)
            detached.start(module, (*files, *words), files)
        except BaseException:  # an audit hook of the script's may raise anything
            for end in mine:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
            if own >= 0:
                os.close(own)
        self.channels = [Channel(end) for end in mine]

    def close(self) -> None:
        """Close the connections."""
        for channel in self.channels:
            channel.close()


# --- a process that several ranks of a node have ----------------------------------------------------------------------


def open_door(name: str) -> socket.socket | None:
    """Return a listening socket under a name of this machine; None if another process has the name."""
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(_address(name))
        door.listen()
    except OSError:
        door.close()
        return None
    return door


def knock(name: str, seconds: float) -> Channel:
    """Return a connection to a named socket, after waiting at most `seconds` for it; raise OSError if there is none."""
    until = time.monotonic() + seconds
    while True:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(_address(name))
            return Channel(end)
        except OSError:
            end.close()
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def _address(name: str) -> str:
    return f"\0ddpdebug-{os.getuid()}-{name}"  # an abstract one: it goes with the process
