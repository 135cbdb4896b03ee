"""The rank's process as its companion sees it: whether it lives, how it ended, and requests to end the companion."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from contextlib import suppress
from pathlib import Path

from ddpdebug.clock import time


class Asked:
    """The time at which a signal asked this process to end."""

    def __init__(self) -> None:
        self.at = float("-inf")
        asking = {signal.SIGTERM, signal.SIGHUP}
        for number in asking:
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.at = time.monotonic()


class Owner:
    """The process that started this one.

    Args:
        descriptor: of it, -1 where there is none.
    """

    def __init__(self, descriptor: int, pid: int) -> None:
        self.descriptor, self._pid = descriptor, pid

    def has_gone(self) -> bool:
        """Return whether the process has ended, not only replaced its program; its sockets close a moment before."""
        if self.descriptor >= 0:
            poll = select.poll()  # for numbers above 1023 too, which those of the rank may be
            poll.register(self.descriptor, select.POLLIN)
            return bool(poll.poll(1000))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    def status(self) -> int | None:
        """Return the process's exit status, as `waitpid` has it; None if unknown.

        Its parent learns that, and the kernel tells others while the parent has not asked; since Linux 6.15 after that.
        """
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8", errors="replace")
            fields = text.rpartition(")")[2].split()
            if fields[0] == "Z":
                return int(fields[49])
        with suppress(OSError):
            about = bytearray(64)  # struct pidfd_info; PIDFD_INFO_EXIT is wanted
            struct.pack_into("Q", about, 0, 1 << 3)
            fcntl.ioctl(self.descriptor, (3 << 30) | (len(about) << 16) | (0xFF << 8) | 11, about)  # PIDFD_GET_INFO
            if struct.unpack_from("Q", about)[0] & (1 << 3):
                return int(struct.unpack_from("i", about, 60)[0])
        return None
