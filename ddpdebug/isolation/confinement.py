"""Confinement of a disposable copy from everything outside; prepared before the process is copied. Torch-free.

Each step is a call of a C function, so that all of them can run in the copy before any code in Python does. They are
given together: descriptors of `/dev/null` in the place of all others, private copies of memory that is shared with
other processes, and a filter of the kernel's (seccomp) that lets nothing through but reading files, and memory, time
and threads of the process's own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

#: Shared memory up to this size is copied; more of it can only be read.
COPIED_BYTES = 64 << 20
_NICE = 1
_DEVICES, _SHARED = "/dev/", ("/dev/shm/", "/dev/zero")  # noqa: S108 - names in a list of the kernel's

#: System calls: name, number on x86_64, number on aarch64 ("-" where it has none). Not in the list is what another
#: process, a file system, a network or a device would see.
_ALLOWED = """
    read 0 63; write 1 64; close 3 57; fstat 5 80; stat 4 -; lstat 6 -; newfstatat 262 79; statx 332 291; statfs 137 43
    fstatfs 138 44; lseek 8 62; pread64 17 67; pwrite64 18 68; readv 19 65; writev 20 66; preadv 295 69; access 21 -
    faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents64 217 61; getcwd 79 17
    chdir 80 49; fadvise64 221 223; ftruncate 77 46; getxattr 191 8; lgetxattr 192 9; umask 95 166
    dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72
    epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; eventfd2 290 19; memfd_create 319 279
    fcntl 72 25; close_range 436 436
    mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; madvise 28 233; mincore 27 232; brk 12 214; mbind 237 235
    get_mempolicy 239 236; set_mempolicy 238 237; membarrier 324 283; pkey_alloc 330 289; pkey_mprotect 329 288
    pkey_free 331 290
    futex 202 98; futex_waitv 449 449; set_robust_list 273 99; get_robust_list 274 100; rseq 334 293
    set_tid_address 218 96; arch_prctl 158 -; prctl 157 167; exit 60 93; exit_group 231 94; restart_syscall 219 128
    rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; sigaltstack 131 132; rt_sigpending 127 136
    rt_sigtimedwait 128 137; wait4 61 260
    getrandom 318 278; clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115; nanosleep 35 101
    gettimeofday 96 169; time 201 -; times 100 153; getrusage 98 165; getrlimit 97 163; sysinfo 99 179; uname 63 160
    getpid 39 172; gettid 186 178; getppid 110 173; getpgrp 111 -; getpgid 121 155; getsid 124 156; getuid 102 174
    geteuid 107 175; getgid 104 176; getegid 108 177; getgroups 115 158; getcpu 309 168; sched_yield 24 124
    sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120; getpriority 140 141
"""
#: System calls that one argument decides about: numbers as above, the argument, bits that must be set, bits that must
#: not be. Files are opened to be read, a new task is a thread, limits and processors are its own.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD, _ANY = 0x10000, 0xFFFFFFFF
_ONLY = (
    ((2, None), 1, 0, _WRITES),  # open
    ((257, 56), 2, 0, _WRITES),  # openat
    ((56, 220), 0, _THREAD, 0),  # clone
    ((302, 261), 0, 0, _ANY),  # prlimit64
    ((203, 122), 0, 0, _ANY),  # sched_setaffinity
)
#: Without these the C library does it in another way, which the filter sees: `clone3`.
_UNKNOWN = ((435, 435),)
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column, kind for the filter, `clone`

_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of the kernel's packet filter
_PDEATHSIG, _DUMPABLE, _NAME, _NO_NEW_PRIVILEGES, _SECCOMP = 1, 4, 15, 38, 22


class UnconfinedError(Exception):
    """A copy cannot be confined here; the text is the reason."""


def function(name: str, *, known: bool = False) -> Callable[..., int]:
    """Return a function of the C library that is called without releasing the interpreter lock.

    Args:
        known: what it returns counts, and is 0 where it has worked; otherwise it returns None.
    """
    found = ctypes.PyDLL(None)[name]
    found.restype = ctypes.c_long if known else None
    return found


@dataclass(slots=True)
class Confinement:
    """The steps that the copy takes, each of which returns a false value, and the objects that they need."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    held: list[object] = field(default_factory=list)

    def add(self, call: str, *args: object, known: bool = False) -> None:
        """Add a call of the C library; with `known` a failure ends all steps."""
        words = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
        self.held += words
        self.steps.append(partial(function(call, known=known), *words))


def clone() -> Callable[[], int]:
    """Return the call that copies this process, as `fork` does, without a signal when the copy ends.

    A copy made so is seen by nobody who waits for children (`os.wait`, `SIGCHLD`), and no hook of `fork` runs.

    Raises:
        UnconfinedError: this machine is not known.
    """
    number = _machine()[2]
    return partial(function("syscall", known=True), *[ctypes.c_long(value) for value in (number, 0, 0, 0, 0, 0)])


def _machine() -> tuple[int, int, int]:
    known = _MACHINES.get(platform.machine())
    if known is None or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise UnconfinedError(f"nothing is run again on {platform.system()} on {platform.machine()}")
    return known


def confinement(seconds: float, own: int, room: int) -> Confinement:
    """Return the confinement that a copy of this process applies to itself before it goes on.

    Args:
        seconds: after which it is ended by the kernel.
        own: address of memory that stays shared.
        room: bytes of memory that it may take beyond what it has.

    Raises:
        UnconfinedError: there is no such thing here.
    """
    found = Confinement()
    found.add("prctl", _PDEATHSIG, signal.SIGKILL)
    found.add("signal", signal.SIGALRM, None)
    found.add("alarm", int(seconds) + 1)
    found.add("setpriority", os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    found.add("prctl", _NAME, b"ddpdebug-replay")
    size = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * mmap.PAGESIZE + room
    limit = ctypes.create_string_buffer(struct.pack("QQ", size, size))
    found.add("setrlimit", resource.RLIMIT_AS, limit)
    _replace_descriptors(found)
    found.add("prctl", _DUMPABLE, 0)  # no core file where it crashes
    _make_private(found, own)
    _filter(found)
    return found


def _replace_descriptors(found: Confinement) -> None:
    known = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    found.add("close_range", 0, 0xFFFFFFFF, 0)
    found.add("close", 0)  # where the kernel knows no `close_range`
    found.add("open", b"/proc/self/oom_score_adj", os.O_WRONLY)  # has the lowest free number, which is 0
    found.add("write", 0, b"1000", 4)
    found.add("close", 0)
    found.add("open", b"/dev/null", os.O_RDWR, known=True)
    for number in {1, 2, *known} - {0}:
        found.add("dup2", 0, number)


def _make_private(found: Confinement, own: int) -> None:
    """Take memory that other processes see out of their sight."""
    shared = [(start, end, name) for start, end, name in _writable_shared() if start != own]
    small = sum(end - start for start, end, _ in shared) <= COPIED_BYTES
    for start, end, name in shared:
        size = end - start
        if small and (not name.startswith(_DEVICES) or name.startswith(_SHARED)):
            copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            at = ctypes.addressof(ctypes.c_char.from_buffer(copy))
            found.held.append(copy)
            found.add("memcpy", at, start, size)
            found.add("mremap", at, size, size, 3, start)  # MAYMOVE, FIXED
        else:
            found.add("mprotect", start, size, mmap.PROT_READ)


def _writable_shared() -> list[tuple[int, int, str]]:
    lines = (line.split(None, 5) for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines())
    shared = ((words[0].split("-"), words[5] if len(words) > 5 else "") for words in lines if words[1][1::2] == "ws")
    return [(int(start, 16), int(end, 16), name) for (start, end), name in shared]


def shares_memory(own: int) -> bool:
    """Whether this process shares writable memory with other processes, `own` not counted."""
    return any([start != own and not name.startswith(_DEVICES) for start, _, name in _writable_shared()])


def _filter(found: Confinement) -> None:
    program = _program(*_machine()[:2])
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(code)))
    found.held += [code, head]
    found.add("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    found.add("prctl", _SECCOMP, 2, head, known=True)


def _program(column: int, kind: int) -> Sequence[bytes]:
    """Return the filter, an instruction each: every system call is refused that is not allowed."""
    lines: list[bytes] = []

    def put(code: int, value: int, then: int = 0, otherwise: int = 0) -> None:
        lines.append(struct.pack("HBBI", code, then, otherwise, value))

    put(_LOAD, 4)
    put(_EQUAL, kind, 1, 0)
    put(_RETURN, _KILL)  # a system call of another kind of machine
    put(_LOAD, 0)
    for row in _ALLOWED.replace(";", "\n").split("\n"):
        words = row.split()
        if words and words[1 + column] != "-":
            put(_EQUAL, int(words[1 + column]), 0, 1)
            put(_RETURN, _ALLOW)
    for numbers in _UNKNOWN:
        put(_EQUAL, numbers[column], 0, 1)
        put(_RETURN, _ERROR | _ENOSYS)
    for both, argument, needed, refused in _ONLY:
        number = both[column]
        if number is not None:
            put(_EQUAL, number, 0, 4)
            put(_LOAD, 16 + 8 * argument)
            put(_ANY_BIT, needed or refused, 0 if needed else 1, 1 if needed else 0)
            put(_RETURN, _ALLOW)
            put(_RETURN, _ERROR | _EPERM)
    put(_RETURN, _ERROR | _EPERM)
    return lines
