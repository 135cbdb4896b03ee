"""What tests ask of the machine: a port, processes by what they were given, and patience."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Found = TypeVar("_Found")
#: Seconds that a wait may take on a machine that does much else; a wait that succeeds takes what it takes.
PATIENCE = 600.0


#: Seconds for which a port belongs to the test that it was given to.
_GIVEN_SECONDS = 600.0


def free_port() -> int:
    """Return a port below those that systems hand out, and that no other test on this machine was given lately."""
    given = Path(tempfile.gettempdir()) / f"ddpdebug-test-ports-{os.getuid()}"
    given.mkdir(exist_ok=True)
    while True:
        port = secrets.choice(range(12_000, 32_000))
        mark = given / str(port)
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > _GIVEN_SECONDS:
                mark.unlink()
        with socket.socket() as s, contextlib.suppress(OSError):
            mark.touch(exist_ok=False)
            s.bind(("127.0.0.1", port))
            return port


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
