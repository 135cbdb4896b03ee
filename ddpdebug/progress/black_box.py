"""The black box of a rank: a small file that survives the process, with its last state and its last calls.

What was written stays whatever ends the process: SIGKILL and SIGABRT as well; after a loss of power what the kernel had
written out. Other processes of the host read it while it is written. Two parts:

- the *look*: JSON, under a counter that is odd while it is written, so that a reader can tell and reads again. It is
  written without the interpreter's lock: a file system that is busy keeps nobody but the watch;
- the *notes*: a ring of fixed places, one for each call that ranks make together, oldest overwritten first. Each place
  carries its number before and after its text, which differ where the process was ended in between. They are written
  through a mapping into memory, in microseconds, where that cannot fail: memory of a file that has no room, or no
  server, ends the process by SIGBUS. So file systems that take new room for what is written over are written to as
  files, and others than those of this host not at all: the box lies in a temporary directory then, with a note of its
  place (`black_box.at`), and is copied into the run directory in the end.

Its room is reserved as it is made: a full disk refuses it then, and nothing later. Torch-free.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import mmap
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdebug.clock import time
from ddpdebug.disk import Disk, kind_of
from ddpdebug.progress import kernel

NAME = "black_box"
#: Beside it: where it lies, `{"host": ..., "file": ...}`.
_AT = ".at"
#: File systems of this host whose files may be mapped, and those that take new room for what is written over.
_MAPPED = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs", "ramfs"})
_COPIES = frozenset({"overlay", "btrfs", "zfs", "f2fs", "bcachefs"})
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
_MAGIC = b"ddpdbbox"
_VERSION = 1
#: magic, version, process, its start in the kernel's ticks, length of the host's name
_HEAD = struct.Struct("<8sIIQI")
_HOST_BYTES = 128
#: A byte: why its beats say nothing, 0 where they do.
_MARK_AT = 248
#: counter, time of the beat, length
_LOOK = struct.Struct("<QdI")
_LOOK_AT, _LOOK_BYTES = 256, 16 << 10
#: number, time, length; behind the text the number again
_NOTE, _NUMBER = struct.Struct("<QdH"), struct.Struct("<Q")
_NOTE_BYTES, _NOTES = 256, 256
_NOTE_TEXT = _NOTE_BYTES - _NOTE.size - _NUMBER.size
#: All of it, written from the front to the back.
_PLACE = struct.Struct(f"{_NOTE.format}{_NOTE_TEXT}sQ")
_NOTES_AT = _LOOK_AT + _LOOK_BYTES
_SIZE = _NOTES_AT + _NOTES * _NOTE_BYTES
_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of the ring: `number` counts from 1, `time` is the host's monotonic clock."""

    number: int
    time: float
    text: str


def make(file: Path, disk: Disk, kind: Callable[[Path], str] = kind_of) -> BlackBox:
    """Return a new box in a file, or in a local folder of this host.

    Raises:
        OSError: there is no room, no such folder, or no place for it.
    """
    found = kind(file.parent)
    if found in _MAPPED | _COPIES:
        _note_of(file).unlink(missing_ok=True)
        return BlackBox(file, disk, mapped=found in _MAPPED)
    chosen = tempfile.tempdir  # which folder the script uses stays to be found out
    try:
        bases = [Path(tempfile.gettempdir()), _MEMORY]
    finally:
        tempfile.tempdir = chosen
    base = next((one for one in bases if one.is_dir() and kind(one) in _MAPPED | _COPIES), None)
    if base is None:
        raise OSError(f"{found or 'this'} file system may not be mapped into memory, and there is no other")
    folder = Path(tempfile.mkdtemp(prefix="ddpdebug-", dir=base))
    try:
        box = BlackBox(folder / NAME, disk, mapped=kind(base) in _MAPPED, kept_in=file)
        place = {"host": kernel.host(), "file": str(folder / NAME)}
        disk.replace(_note_of(file), [json.dumps(place).encode()])
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with suppress(OSError):
        file.unlink()  # of an earlier process
    return box


class BlackBox:
    """The writer, for one process.

    Args:
        mapped: the file may be mapped into memory.
        kept_in: where it is copied to in the end; it lies in a folder of its own, which goes then.

    Raises:
        OSError: there is no room, or no such folder.
    """

    def __init__(self, file: Path, disk: Disk, *, mapped: bool = True, kept_in: Path | None = None) -> None:
        with suppress(FileNotFoundError):
            file.unlink()  # another process may still have it in memory: cutting it off there would end that process
        with disk.open(file, os.O_RDWR | os.O_EXCL) as opened:
            if not hasattr(os, "posix_fallocate"):  # macOS
                raise OSError("room cannot be reserved in advance on this system")
            os.posix_fallocate(opened.fileno(), 0, _SIZE)
            self._map = _Mapped(opened.fileno()) if mapped else None
            self._is = _identity(opened.fileno())
        self._path, self._kept_in, self._disk, self._closed = file, kept_in, disk, False
        self._pid = os.getpid()
        name = kernel.host().encode()[:_HOST_BYTES]
        head = _HEAD.pack(_MAGIC, _VERSION, self._pid, kernel.started(self._pid), len(name))
        self._write(_HEAD.size, name)
        self._write(0, head)
        self._counter, self._numbers = 0, itertools.count(1)  # any thread may write a note

    def _write(self, at: int, *parts: bytes) -> None:
        """Write parts, each at the same place, one after the other.

        No descriptor is kept: a script may close all that are open, and write its own files under their numbers.
        """
        with suppress(OSError):  # it was deleted, a limit of the script's, a disk that fails
            file = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                for part in parts if _identity(file) == self._is else ():
                    os.pwrite(file, part, at)
            finally:
                os.close(file)

    def beat(self, look: Mapping[str, Any] | None = None) -> None:
        """Write a sign of life, and the rank's state if it is new."""
        if self._closed or os.getpid() != self._pid:
            return
        if look is None:
            self._write(_LOOK_AT + 8, struct.pack("<d", time.monotonic()))
            return
        text = json.dumps(look).encode()
        while len(text) > _LOOK_BYTES - _LOOK.size:  # whole fields are left out: half a one would be none at all
            spare = next((name for name in ("recent", "stack") if name in look), None)
            left_out = spare or max(look.items(), key=lambda item: len(json.dumps(item[1])))[0]
            look = {name: value for name, value in look.items() if name != left_out}
            text = json.dumps(look).encode()
        self._counter += 2
        head = _LOOK.pack(self._counter - 1, time.monotonic(), len(text))
        self._write(_LOOK_AT, head + text, struct.pack("<Q", self._counter))

    def mark(self, mark: int) -> None:
        """Mark that no beat may follow though the interpreter runs; 0 removes the mark.

        Around every record it is no more than a byte in memory: where there is none, nothing is said.
        """
        memory = self._map
        if memory is None or self._closed or os.getpid() != self._pid:
            return
        memory.bytes[_MARK_AT] = mark

    def note(self, text: str) -> None:
        """Write a line into the ring, cut after 230 bytes."""
        if self._closed or os.getpid() != self._pid:
            return
        number = next(self._numbers)
        at = _NOTES_AT + (number - 1) % _NOTES * _NOTE_BYTES
        data = text.encode("utf-8", "replace")[:_NOTE_TEXT]
        memory = self._map
        if memory is None:
            self._write(at, _PLACE.pack(number, time.monotonic(), len(data), data, number))
        else:
            _PLACE.pack_into(memory.bytes, at, number, time.monotonic(), len(data), data, number)

    def close(self) -> None:
        """Release the memory; the file stays, and is moved to its final place."""
        self._map = None
        closed, self._closed = self._closed, True
        if self._kept_in is not None and not closed and os.getpid() == self._pid:
            keep(self._kept_in, self._disk)


class _Mapped:
    """A mapping of the file, for as long as somebody has it.

    That of `mmap` keeps a descriptor, which it closes in the end, whoever has its number then.
    """

    def __init__(self, file: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        at = libc.mmap(None, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if at in {None, ctypes.c_void_p(-1).value}:
            raise OSError(ctypes.get_errno(), "the black box cannot be mapped into memory")
        self._give_back, self._at = libc.munmap, at
        self.bytes = (ctypes.c_ubyte * _SIZE).from_address(at)

    def __del__(self) -> None:
        if hasattr(self, "_at"):
            self._give_back(self._at, _SIZE)


def keep(file: Path, disk: Disk) -> None:
    """Copy a box from a temporary folder of this host to its final place; do nothing if it lies there already."""
    place = _elsewhere(file)
    data = None if place is None else _bytes_of(place)
    if place is None or data is None:
        return
    with suppress(OSError):
        disk.replace(file, [data])
        _note_of(file).unlink()
        shutil.rmtree(place.parent, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The content of a black box.

    Args:
        pid: of the process that has written it, and `started` when that began.
        here: it was written on this host, so that its times and the process can be compared.
        beat: when the process last said that it is alive.
        look: its last look, as JSON; empty where it could not be read.
        notes: oldest first.
        mark: why its beats say nothing, 0 where they do.
    """

    pid: int
    started: int
    here: bool
    beat: float
    look: Mapping[str, Any]
    notes: tuple[Note, ...]
    mark: int = 0

    def kernel(self) -> kernel.Kernel | None:
        """Return the kernel's view of the process; None if it has ended or runs on another host."""
        known = kernel.process(self.pid) if self.here else None
        return known if known is not None and known.started == self.started else None


def read(file: Path, *, notes: bool = True) -> Recorded | None:
    """Return the content of a black box; None if there is none or it is damaged."""
    file = _elsewhere(file) or file
    data = _bytes_of(file)
    if data is None:
        return None
    magic, version, pid, started, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or length > _HOST_BYTES:
        return None
    here = data[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace") == kernel.host()
    beat, look = _read_look(file, data)
    ring = _read_notes(data) if notes else ()
    return Recorded(pid=pid, started=started, here=here, beat=beat, look=look, notes=ring, mark=data[_MARK_AT])


def _identity(descriptor: int) -> tuple[int, int]:
    known = os.fstat(descriptor)
    return known.st_dev, known.st_ino


def _note_of(file: Path) -> Path:
    return file.with_name(file.name + _AT)


def _elsewhere(file: Path) -> Path | None:
    """Return where on this host a box lies that is not where it belongs."""
    try:
        place = json.loads(_note_of(file).read_bytes())
        path = Path(place["file"])
        right = place["host"] == kernel.host() and path.name == NAME and path.parent.name.startswith("ddpdebug-")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return path if right else None


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
