"""The companion's process: the rules judge in one thread, another one serves; it ends with its rank or soon after."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdebug.clock import time
from ddpdebug.companion.calls import dumped
from ddpdebug.companion.owner import Asked, Owner
from ddpdebug.companion.speaker import House
from ddpdebug.processes.beside import Channel, GoneError

#: It yields to the ranks, which wait for each other, and to the host where memory runs out.
_NICE, _KILLED_FIRST = 5, "800"


def main(words: tuple[int, int, int, int]) -> None:
    """Answer and serve until the ranks have ended; ends the process.

    Args:
        words: the descriptors of the two connections and of the rank's process, -1 where there is none, and its number.
    """
    judge, records, descriptor, pid = words
    try:
        House(_behave()).take(Channel(socket.socket(fileno=records)), Owner(descriptor, pid))
        _judge(Channel(socket.socket(fileno=judge)), descriptor)
        while True:
            time.sleep(60.0)  # handlers of signals run here
    finally:
        os._exit(0)


def _behave() -> Asked:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks, and their end is this one's
    asked = Asked()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the job's mask is inherited
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):  # a rank may be bound to a core, which it needs
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, encoding="ascii")
    return asked


def _judge(rank: Channel, process: int) -> None:
    judge: Any = None
    with suppress(GoneError):
        while True:
            said: dict[str, Any] = json.loads(rank.receive(None, process) or b"{}")
            from ddpdebug.companion.judge import Judge  # noqa: PLC0415 - a rank may only have something to serve

            try:
                judge = judge or Judge(said["begin"])
                answer = dumped(judge.reply(said["calls"]))
            except Exception as error:  # noqa: BLE001 - the rank says that nothing is judged any more
                answer = dumped({"failed": f"{type(error).__name__}: {error}"})
            rank.send(answer)
            rank.flush(math.inf)
