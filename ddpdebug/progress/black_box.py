"""The black box of a rank: a small file in memory that survives the process, with its last look and its last calls.

It is mapped into memory, so that writing takes microseconds, waits for no disk, and what was written stays whatever
ends the process: SIGKILL and SIGABRT as well; after a loss of power what the kernel had written out. Other processes of
the host read it while it is written. Two parts:

- the *look*: JSON, under a counter that is odd while it is written, so that a reader can tell and reads again;
- the *notes*: a ring of fixed places, one for each call that ranks make together, oldest overwritten first. Each place
  carries its number before and after its text, which differ where the process was ended in between.

Its room is reserved as it is made: a full disk refuses it then, and nothing later. Torch-free.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdebug.disk import Disk
from ddpdebug.progress import kernel

NAME = "black_box"
_MAGIC = b"ddpdbbox"
_VERSION = 1
#: magic, version, process, its start in the kernel's ticks, length of the host's name
_HEAD = struct.Struct("<8sIIQI")
_HOST_BYTES = 128
#: counter, time of the beat, length
_LOOK = struct.Struct("<QdI")
_LOOK_AT, _LOOK_BYTES = 256, 16 << 10
#: number, time, length; behind the text the number again
_NOTE, _NUMBER = struct.Struct("<QdH"), struct.Struct("<Q")
_NOTE_BYTES, _NOTES = 256, 256
_NOTES_AT = _LOOK_AT + _LOOK_BYTES
_SIZE = _NOTES_AT + _NOTES * _NOTE_BYTES
_NOTE_TEXT = _NOTE_BYTES - _NOTE.size - _NUMBER.size
_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of the ring: `number` counts from 1, `time` is of the monotonic clock of the host."""

    number: int
    time: float
    text: str


class BlackBox:
    """The writer, for one process.

    Raises:
        OSError: there is no room, or no such folder.
    """

    def __init__(self, file: Path, disk: Disk) -> None:
        with suppress(FileNotFoundError):
            file.unlink()  # another process may still have it in memory: cutting it off there would end that process
        with disk.open(file, os.O_RDWR | os.O_EXCL) as opened:
            os.posix_fallocate(opened.fileno(), 0, _SIZE)
            self._map: mmap.mmap | None = mmap.mmap(opened.fileno(), _SIZE)
        self._pid = os.getpid()
        name = kernel.host().encode()[:_HOST_BYTES]
        head = _HEAD.pack(_MAGIC, _VERSION, self._pid, kernel.started(self._pid), len(name))
        self._map[_HEAD.size : _HEAD.size + len(name)] = name
        self._map[: _HEAD.size] = head
        self._counter = self._number = 0

    def beat(self, look: Mapping[str, Any] | None = None) -> None:
        """Say that this process is alive, and what it sees, if that is anything new."""
        memory = self._map
        if memory is None or os.getpid() != self._pid:
            return
        if look is None:
            struct.pack_into("<d", memory, _LOOK_AT + 8, time.monotonic())
            return
        text = json.dumps(look).encode()
        if len(text) > _LOOK_BYTES - _LOOK.size:
            text = json.dumps({**look, "recent": [], "stack": []}).encode()[: _LOOK_BYTES - _LOOK.size]
        self._counter += 1
        _LOOK.pack_into(memory, _LOOK_AT, self._counter, time.monotonic(), len(text))
        start = _LOOK_AT + _LOOK.size
        memory[start : start + len(text)] = text
        self._counter += 1
        struct.pack_into("<Q", memory, _LOOK_AT, self._counter)

    def note(self, text: str) -> None:
        """Write a line into the ring: cut where it is longer than 230 bytes."""
        memory = self._map
        if memory is None or os.getpid() != self._pid:
            return
        self._number = number = self._number + 1
        at = _NOTES_AT + (number - 1) % _NOTES * _NOTE_BYTES
        data = text.encode("utf-8", "replace")[:_NOTE_TEXT]
        _NOTE.pack_into(memory, at, number, time.monotonic(), len(data))
        start = at + _NOTE.size
        memory[start : start + len(data)] = data
        _NUMBER.pack_into(memory, at + _NOTE_BYTES - _NUMBER.size, number)

    def close(self) -> None:
        """Give the memory back; the file stays."""
        memory, self._map = self._map, None
        if memory is not None:
            with suppress(BufferError):
                memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a black box holds.

    Args:
        pid: of the process that has written it, and `started` when that began.
        here: it was written on this host, so that its times and the process can be compared.
        beat: when the process last said that it is alive.
        look: its last look, as JSON; empty where it could not be read.
        notes: oldest first.
    """

    pid: int
    started: int
    here: bool
    beat: float
    look: Mapping[str, Any]
    notes: tuple[Note, ...]

    def kernel(self) -> kernel.Kernel | None:
        """Return what the kernel shows of the process; None where there is none any more, or on another host."""
        known = kernel.process(self.pid) if self.here else None
        return known if known is not None and known.started == self.started else None


def read(file: Path, *, notes: bool = True) -> Recorded | None:
    """Return what a black box holds; None where there is none, or it is damaged."""
    data = _bytes_of(file)
    if data is None:
        return None
    magic, version, pid, started, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or length > _HOST_BYTES:
        return None
    here = data[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace") == kernel.host()
    beat, look = _read_look(file, data)
    ring = _read_notes(data) if notes else ()
    return Recorded(pid=pid, started=started, here=here, beat=beat, look=look, notes=ring)


def _read_look(file: Path, data: bytes) -> tuple[float, Mapping[str, Any]]:
    beat = 0.0
    for attempt in range(_TRIES):
        counter, beat, length = _LOOK.unpack_from(data, _LOOK_AT)
        beat = beat if math.isfinite(beat) else 0.0
        start = _LOOK_AT + _LOOK.size
        if counter % 2 == 0 and length <= _LOOK_BYTES - _LOOK.size:
            with suppress(ValueError, RecursionError):
                look = json.loads(data[start : start + length] or b"{}")
                if isinstance(look, dict):
                    return beat, look
        if attempt < _TRIES - 1:
            time.sleep(0.001)
            data = _bytes_of(file) or data
    return beat, {}


def _bytes_of(file: Path) -> bytes | None:
    """Return the content of a file that has the size of a black box; None of anything else, for which nobody waits."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            data = opened.read(_SIZE + 1)
    except OSError:
        return None
    return data if len(data) == _SIZE else None


def _read_notes(data: bytes) -> tuple[Note, ...]:
    found = []
    for place in range(_NOTES):
        at = _NOTES_AT + place * _NOTE_BYTES
        number, when, length = _NOTE.unpack_from(data, at)
        (again,) = _NUMBER.unpack_from(data, at + _NOTE_BYTES - _NUMBER.size)
        if number == 0 or length > _NOTE_TEXT or (number - 1) % _NOTES != place:
            continue
        if again != number:  # ended in between: what was written last is still worth reading
            length = min(length, _NOTE_TEXT)
        start = at + _NOTE.size
        text = data[start : start + length].decode("utf-8", "replace")
        when = when if math.isfinite(when) else 0.0
        found.append(Note(number=number, time=when, text=text if again == number else text + " (cut)"))
    return tuple(sorted(found, key=lambda note: note.number))
