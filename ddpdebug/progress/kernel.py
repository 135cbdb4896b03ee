"""What the kernel shows of a process on this host: its state, what it waits in, and whether anything moves. Torch-free.

Read from `/proc` only while somebody waits; elsewhere than on Linux nothing is known. Source: proc(5).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")
_WORDS = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in uninterruptible I/O",
    "Z": "dead, and not yet collected",
    "X": "dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A process or thread at one moment.

    Args:
        state: the kernel's letter: R runs, S sleeps, D uninterruptible, T stopped, Z dead.
        wchan: the function of the kernel that it sleeps in; empty where that is not shown.
        cpu: seconds of processor time so far.
        queued: seconds in which it could have run and another process did.
        wakes: times that it went to sleep by itself.
        disk: bytes read from and written to storage.
        started: when it began, in the kernel's ticks: with the number it names a process for ever.
        ended_by: of a process that is dead and not yet collected, its exit status as `wait` has it.
    """

    state: str
    wchan: str = ""
    cpu: float = 0.0
    queued: float = 0.0
    wakes: int = 0
    disk: int = 0
    started: int = 0
    ended_by: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state in "Tt"

    def moved_since(self, before: Kernel, seconds: float, *, share: float = 0.05) -> bool:
        """Whether it has run, or wanted to, for more than a share of the time since, or has moved data."""
        if self.disk != before.disk:
            return True
        return self.cpu - before.cpu + self.queued - before.queued > share * seconds

    def words(self) -> str:
        """Say the state for people."""
        where = f" in {self.wchan}" if self.wchan not in {"", "0"} else ""
        return _WORDS.get(self.state, "runs" if self.state == "R" else "asleep") + (
            where if self.state in "SDT" else ""
        )


def process(pid: int) -> Kernel | None:
    """Return what the kernel shows of a process with all its threads; None where there is none, or it is not shown."""
    folder = _PROC / str(pid)
    known = _stat(folder / "stat")
    if known is None:
        return None
    state, cpu, started = known
    queued = 0.0
    with suppress(OSError):
        queued = sum(_queued(thread) for thread in (folder / "task").iterdir())
    return Kernel(
        state=state,
        wchan=_word(folder / "wchan"),
        cpu=cpu,
        queued=queued,
        disk=_disk(folder),
        started=started,
        ended_by=_ended_by(folder) if state in "ZX" else None,
    )


def thread(native_id: int) -> Kernel | None:
    """Return what the kernel shows of a thread of this process."""
    folder = _PROC / "self" / "task" / str(native_id)
    known = _stat(folder / "stat")
    if known is None:
        return None
    state, cpu, started = known
    wakes = 0
    with suppress(OSError, ValueError):
        lines = (folder / "status").read_text(encoding="ascii", errors="replace").splitlines()
        wakes = sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    wchan = _word(folder / "wchan")
    disk, queued = _disk(folder), _queued(folder)
    return Kernel(state=state, wchan=wchan, cpu=cpu, queued=queued, wakes=wakes, disk=disk, started=started)


def disk_beside(native_id: int) -> int:
    """Return the bytes that this process has read from and written to storage, without those of one thread."""
    return _disk(_PROC / "self") - _disk(_PROC / "self" / "task" / str(native_id))


def started(pid: int) -> int:
    """Return when a process began, in ticks of the kernel; 0 where that is not known."""
    known = _stat(_PROC / str(pid) / "stat")
    return 0 if known is None else known[2]


def children() -> list[int]:
    """Return the processes that this one has started; none where the kernel does not tell."""
    found: list[int] = []
    for folder in _PROC.glob("self/task/*/children"):
        with suppress(OSError, ValueError):
            found += map(int, folder.read_bytes().split())
    return found


def ending(status: int) -> str:
    """Say how a process has ended, by its exit status as `wait` has it."""
    number = status & 0x7F
    if number == 0:
        return f"it has ended with exit status {status >> 8}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"it was killed by {name}"


def cpu_of(pids: Iterable[int]) -> float:
    """Return the seconds of processor time of other processes together."""
    found = (_stat(_PROC / str(pid) / "stat") for pid in pids)
    return sum(known[1] for known in found if known is not None)


@cache
def host() -> str:
    """Return what names this host until it boots again, and the processes that one `/proc` shows."""
    boot = _word(_PROC / "sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    return boot


def _stat(file: Path) -> tuple[str, float, int] | None:
    """Return the state, the processor time in seconds, and the start."""
    try:
        fields = file.read_bytes().rpartition(b")")[2].split()  # a name may hold spaces and brackets
        return fields[0].decode("ascii"), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _ended_by(folder: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int((folder / "stat").read_bytes().rpartition(b")")[2].split()[49])
    return None


def _queued(folder: Path) -> float:
    with suppress(OSError, ValueError, IndexError):
        return int((folder / "schedstat").read_bytes().split()[1]) / 1e9
    return 0.0


def _disk(folder: Path) -> int:
    with suppress(OSError, ValueError):
        lines = (folder / "io").read_bytes().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith((b"read_bytes", b"write_bytes")))
    return 0


def _word(file: Path) -> str:
    with suppress(OSError):
        return file.read_bytes().decode("ascii", "replace").strip()
    return ""
