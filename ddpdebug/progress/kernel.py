"""The kernel's view of a process on this host: its state, its wait, and whether anything moves. Torch-free.

Read from `/proc` only while somebody waits; elsewhere than on Linux nothing is known. Source: proc(5).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from ddpdebug.sinks.words import signal_name

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")
#: Bytes a second from which on data moves: the slowest download has more, who asks a file again and again less.
_DATA_PER_SECOND = 4096.0
#: Processes and threads of each that are looked at for what a rank has started.
_MOST_PROCESSES, _MOST_THREADS, _MOST_THREADS_OF_ALL = 64, 32, 256
#: Threads of this process that are looked at.
_MOST_OWN_THREADS = 256
#: Share of the time for which one that works wants to run, however little of it it gets on a busy machine: those that
#: only wake up now and then have to stand in line there as well.
WANTING_SHARE = 0.5
#: Functions of the kernel in which a thread waits for time to pass, or another thread: to wake from them moves nothing.
_IDLE_WAITS = ("hrtimer_nanosleep", "futex")
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
        data: bytes read and written altogether, not those of sockets.
        started: when it began, in the kernel's ticks: with the number it names a process for ever.
        ended_by: of a process that is dead and not yet collected, its exit status as `wait` has it.
    """

    state: str
    wchan: str = ""
    cpu: float = 0.0
    queued: float = 0.0
    wakes: int = 0
    disk: int = 0
    data: int = 0
    started: int = 0
    ended_by: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in "Tt"

    def moved_since(self, before: Kernel, seconds: float, *, share: float = 0.05) -> bool:
        """Whether the process ran, or was ready to, for more than a share of the time since, or moved data."""
        if self.disk != before.disk or self.data - before.data > _DATA_PER_SECOND * seconds:
            return True
        return self.cpu - before.cpu + self.queued - before.queued > share * seconds

    def words(self) -> str:
        """Return the state in words."""
        where = f" in {self.wchan}" if self.wchan not in {"", "0"} else ""
        return _WORDS.get(self.state, "runs" if self.state == "R" else "asleep") + (
            where if self.state in "SDT" else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The use of time and disk by processes and all their descendants so far, ended ones included.

    Args:
        cpu: seconds of processor time.
        queued: seconds in which a thread of theirs could have run and another process did.
        data: bytes read and written, not those of sockets.
        wakes: times that something other than time woke one of their threads: data of a socket, for one.
        blocked: processes whose first thread is in uninterruptible I/O, each with how often it has gone to sleep.
    """

    cpu: float = 0.0
    queued: float = 0.0
    data: int = 0
    wakes: int = 0
    blocked: frozenset[tuple[int, int]] = frozenset()

    def moved_since(self, before: Family, seconds: float, *, share: float, wakes: float) -> bool:
        """Whether the processes computed for more than a share of the time since, moved data, or woke often."""
        return (
            self.cpu - before.cpu > share * seconds
            or self.cpu - before.cpu + self.queued - before.queued > WANTING_SHARE * seconds
            or self.data - before.data > _DATA_PER_SECOND * seconds
            or self.wakes - before.wakes > wakes * seconds
        )


def process(pid: int) -> Kernel | None:
    """Return the kernel's view of a process with all its threads; None if there is none, or it is hidden."""
    folder = _PROC / str(pid)
    known = _stat(folder / "stat")
    if known is None:
        return None
    state, cpu, started = known
    queued = 0.0
    with suppress(OSError):
        queued = sum(_queued(thread) for thread in (folder / "task").iterdir())
    disk, data = _moved(folder)
    return Kernel(
        state=state,
        wchan=_word(folder / "wchan"),
        cpu=cpu,
        queued=queued,
        disk=disk,
        data=data,
        started=started,
        ended_by=_ended_by(folder) if state in "ZX" else None,
    )


def thread(native_id: int) -> Kernel | None:
    """Return the kernel's view of a thread of this process; None if there is none."""
    folder = _PROC / "self" / "task" / str(native_id)
    known = _stat(folder / "stat")
    if known is None:
        return None
    state, cpu, started = known
    disk, data = _moved(folder)
    return Kernel(
        state=state,
        wchan=_word(folder / "wchan"),
        cpu=cpu,
        queued=_queued(folder),
        wakes=_wakes(folder),
        disk=disk,
        data=data,
        started=started,
    )


def disk_beside(native_id: int) -> int:
    """Return the bytes that this process has read from and written to storage, without those of one thread."""
    return _moved(_PROC / "self")[0] - _moved(_PROC / "self" / "task" / str(native_id))[0]


def wanted_beside(native_id: int) -> dict[int, float]:
    """Return the seconds for which each thread of this process ran or was ready to, except one thread."""
    with suppress(OSError):
        tasks = islice((_PROC / "self" / "task").iterdir(), _MOST_OWN_THREADS)
        return {int(task.name): _wanted(task) for task in tasks if task.name != str(native_id)}
    return {}


def started(pid: int) -> int:
    """Return the start of a process in ticks of the kernel; 0 if unknown."""
    known = _stat(_PROC / str(pid) / "stat")
    return 0 if known is None else known[2]


def children(pid: int | str = "self") -> list[int]:
    """Return the child processes of a process, by default of this one; empty if the kernel does not report them."""
    found: list[int] = []
    for file in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError, ValueError):
            found += map(int, file.read_bytes().split())
    return found


def family(pids: Iterable[int]) -> Family:
    """Return the use of time and disk by processes and all their descendants."""
    todo, seen = list(pids), set[int]()
    cpu, queued, data, wakes, threads = 0.0, 0.0, 0, 0, _MOST_THREADS_OF_ALL
    blocked = set[tuple[int, int]]()
    while todo and len(seen) < _MOST_PROCESSES:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        todo += children(pid)
        folder = _PROC / str(pid)
        cpu += _cpu_with_ended(folder)
        data += _moved(folder)[1]
        known = _stat(folder / "stat")
        if known is not None and known[0] == "D":
            blocked.add((pid, _wakes(folder)))
        with suppress(OSError):
            for one in islice((folder / "task").iterdir(), min(_MOST_THREADS, threads)):
                threads -= 1
                queued += _queued(one)
                wakes += 0 if _word(one / "wchan").startswith(_IDLE_WAITS) else _wakes(one)
    return Family(cpu=cpu, queued=queued, data=data, wakes=wakes, blocked=frozenset(blocked))


def ending(status: int) -> str:
    """Return the end of a process in words, by its exit status as `wait` has it."""
    number = status & 0x7F
    if number == 0:
        return f"it has ended with exit status {status >> 8}"
    return f"it was killed by {signal_name(number)}"


def host() -> str:
    """Return an identity of this host until its next boot, and of the processes that one `/proc` shows.

    Where that is not known each call returns another name: nothing can be said to be on this host then.
    """
    return _host() or f"unknown {uuid.uuid4()}"


@cache
def _host() -> str:
    boot = _word(_PROC / "sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}" if boot else ""
    return ""


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


def _wanted(folder: Path) -> float:
    with suppress(OSError, ValueError, IndexError):
        ran, queued = (folder / "schedstat").read_bytes().split()[:2]
        return (int(ran) + int(queued)) / 1e9
    return 0.0


def _moved(folder: Path) -> tuple[int, int]:
    """Return the bytes read from and written to storage, and those read and written altogether."""
    with suppress(OSError, ValueError):
        known = dict(line.split(b": ") for line in (folder / "io").read_bytes().splitlines())
        return (
            int(known.get(b"read_bytes", 0)) + int(known.get(b"write_bytes", 0)),
            int(known.get(b"rchar", 0)) + int(known.get(b"wchar", 0)),
        )
    return 0, 0


def _wakes(folder: Path) -> int:
    with suppress(OSError, ValueError):
        lines = (folder / "status").read_text(encoding="ascii", errors="replace").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return 0


def _cpu_with_ended(folder: Path) -> float:
    """Return the processor time of a process and of those that it has started and waited for."""
    with suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    return 0.0


def _word(file: Path) -> str:
    with suppress(OSError):
        return file.read_bytes().decode("ascii", "replace").strip()
    return ""
