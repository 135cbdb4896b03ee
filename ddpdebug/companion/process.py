"""The companion's process: it answers the rank that has started it, and ends with that rank."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdebug.companion.calls import dumped
from ddpdebug.companion.judge import Judge
from ddpdebug.processes.beside import Channel, GoneError

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
        _serve(Channel(socket.socket(fileno=connection)), rank)
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


def _serve(rank: Channel, process: int) -> None:
    judge: Judge | None = None
    with suppress(GoneError):
        while True:
            said: dict[str, Any] = json.loads(rank.receive(None, process) or b"{}")
            try:
                judge = judge or Judge(said["begin"])
                answer = dumped(judge.reply(said["calls"]))
            except Exception as error:  # noqa: BLE001 - the rank says that nothing is judged any more
                answer = dumped({"failed": f"{type(error).__name__}: {error}"})
            rank.send(answer)
            rank.flush(math.inf)
