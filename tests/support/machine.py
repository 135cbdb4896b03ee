"""What tests ask of the machine: a port, processes by what they were given, and patience."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

_Found = TypeVar("_Found")
#: Seconds that a wait may take on a machine that does much else; a wait that succeeds takes what it takes.
PATIENCE = 600.0


#: The locks of the ports that were given out last: a port belongs to who has asked for it for that long.
_GIVEN: deque[IO[str]] = deque(maxlen=100)


def free_port() -> int:
    """Return a port below those that systems hand out, and that no other test on this machine is given meanwhile."""
    locks = Path(tempfile.gettempdir()) / f"ddpdebug-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    while True:
        port = secrets.choice(range(12_000, 32_000))
        lock = (locks / str(port)).open("w")
        with socket.socket() as s, contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            s.bind(("127.0.0.1", port))
            _GIVEN.append(lock)
            return port
        lock.close()


def until(look: Callable[[], _Found], seconds: float = PATIENCE, pause: float = 0.05) -> _Found:
    """Look until what is seen is true, or the time is over, and return what was seen last."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(pause)
    return found


def processes(variable: str) -> list[int]:
    """Return the processes that are alive and have `NAME=value` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if variable.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
