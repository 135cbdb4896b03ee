"""The companion's process: it answers the rank that has started it, and ends with that rank."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdebug.companion.calls import HEAD, dumped
from ddpdebug.companion.judge import Judge

#: It yields to the ranks, which wait for each other, and to the host where memory runs out.
_NICE, _KILLED_FIRST = 5, "800"


def main(words: tuple[int, int]) -> None:
    """Answer until the rank has gone; ends the process.

    Args:
        words: the descriptors of the connection and of the rank's process, the second -1 where there is none.
    """
    connection, rank = words
    try:
        _behave()
        _serve(socket.socket(fileno=connection), rank)
    finally:
        os._exit(0)


def _behave() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks, and their end is this one's
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the job's mask is inherited
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):  # a rank may be bound to a core, which it needs
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, encoding="ascii")


def _serve(connection: socket.socket, rank: int) -> None:
    judge: Judge | None = None
    while (message := _read(connection, rank)) is not None:
        said: dict[str, Any] = json.loads(message)
        try:
            judge = judge or Judge(said["begin"])
            answer = dumped(judge.reply(said["calls"]))
        except Exception as error:  # noqa: BLE001 - the rank says that nothing is judged any more
            answer = dumped({"failed": f"{type(error).__name__}: {error}"})
        try:
            connection.sendall(HEAD.pack(len(answer)) + answer)
        except OSError:
            return


def _read(connection: socket.socket, rank: int) -> bytes | None:
    """Return the next message; None once the rank has gone."""
    head = _exactly(connection, rank, HEAD.size)
    return None if head is None else _exactly(connection, rank, HEAD.unpack(head)[0])


def _exactly(connection: socket.socket, rank: int, size: int) -> bytes | None:
    data = bytearray()
    poll = select.poll()
    for descriptor in (connection.fileno(), rank):
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    while len(data) < size:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if connection.fileno() not in ready:  # the rank has gone, though children of it may have the connection open
            return None
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
