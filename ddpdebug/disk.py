"""Disk access of ddpdebug: private files, and only space that the job can spare. Torch-free.

A job writes checkpoints into the same file systems, and one that fails for lack of room costs hours, where a bundle
costs a hint. So every writer asks `Disk.refusal` before each write, and what was not written is counted.

A script may close descriptors that are not its own and open files under their numbers, and may put another directory in
the place of the run's (`os.chroot`). So what stays open is `Kept`, and used while its number leads to what was opened;
and nothing is made below a run directory that is not the one that was begun.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import secrets
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ddpdebug.signals import without_signals

#: Left for the job by what is large: so many times its parameters and optimizer state, at least so many bytes, at least
#: this share of the file system, of which no more than so many bytes count.
_TIMES, _FLOOR, _SHARE, _MOST_OF_SHARE = 4, 256 << 20, 0.05, 64 << 30
#: Rows and observations are bounded (128 MiB in all) and worth more: they leave two checkpoints, and this.
_ROWS_TIMES, _ROWS_FLOOR = 2, 32 << 20
#: What stopped for lack of room goes on when there is so many times the room that it needs: no to and fro.
_AGAIN = 2
_SMALL = frozenset({"rows", "observations", "summaries"})
_LEAST_FILES = 64
_BLOCK = 4096

PRIVATE = 0o600


class Free(NamedTuple):
    """The free space of a file system, in bytes and files."""

    bytes: int
    total: int
    files: int | None  # None where it does not count them


class NoRoomError(OSError):
    """A write was refused, because the job may need the space."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ENOSPC, reason)
        self.reason = reason


class Disk:
    """Permissions and free space for everything that ddpdebug writes: private files, and a reserve for the job.

    Args:
        mode: permissions of new files; directories are passable for whom files are readable. None is what the
            process's umask leaves.
        ranks: how many ranks may write into the same file system: each takes its share of what can be spared.
        free: looks at the file system of a path.
    """

    def __init__(
        self, mode: int | None = PRIVATE, *, ranks: int = 1, free: Callable[[Path], Free] | None = None
    ) -> None:
        self.ranks = max(1, ranks)
        self.needed = 0  # bytes of the job's parameters and optimizer state on this rank, once they are known
        self.left_out: Counter[str] = Counter()  # what -> how often it was not written
        self._mode, self._free = mode, free or Volumes()
        self._stopped: set[str] = set()
        self._home: tuple[Path, tuple[int, int]] | None = None  # the run directory, and which one it is

    # --- room ---------------------------------------------------------------------------------------------------------

    def refusal(self, path: Path, size: int, what: str) -> str | None:
        """Return why `size` bytes must not be written to a path now; None if there is enough space.

        Args:
            what: rows, observations and summaries leave less, everything else is large.
        """
        small = what in _SMALL
        try:
            free = self._free(path)
        except OSError as error:
            return self._refuse(what, f"the disk cannot be asked for its room: {error.strerror or error}")
        if small:
            reserve = max(_ROWS_FLOOR, _ROWS_TIMES * self.needed)
        else:
            share = min(int(_SHARE * free.total), _MOST_OF_SHARE)
            reserve = max(_FLOOR, _TIMES * self.needed, share)
        spare = max(0, free.bytes - reserve) // (1 if small else self.ranks)  # rows are rank 0's alone
        wanted = size * _AGAIN if what in self._stopped and small else size
        if small and what in self._stopped:
            wanted += reserve * (_AGAIN - 1)
        limit = _file_limit()
        if free.files is not None and free.files < _LEAST_FILES:
            return self._refuse(what, f"the file system has {free.files} files left")
        if limit is not None and size > limit:
            return self._refuse(what, f"files may have {limit} bytes (ulimit -f)")
        if wanted > spare:
            shared = f", shared by {self.ranks} ranks" if self.ranks > 1 and not small else ""
            return self._refuse(
                what,
                f"{size} bytes are needed, and of {free.bytes} free ones {reserve} are left for the job{shared}",
            )
        self._stopped.discard(what)
        return None

    def _refuse(self, what: str, reason: str) -> str:
        self.left_out[what] += 1
        self._stopped.add(what)
        return reason

    # --- files --------------------------------------------------------------------------------------------------------

    def begin(self, directory: Path) -> None:
        """Make a run directory; writes below it are refused once it is gone or another one has taken its place.

        One that is new keeps itself out of what version control sees; what was there before is the user's.
        """
        if self.make_directory(directory):
            with suppress(OSError):
                self.write(directory / ".gitignore", b"*\n")
        self._home = directory, _identity(directory.stat())

    def _require_home(self, path: Path) -> None:
        if self._home is None or not path.is_relative_to(self._home[0]):
            return
        directory, known = self._home
        try:
            found = _identity(directory.stat())
        except OSError:
            found = None
        if found != known:
            raise FileNotFoundError(errno.ENOENT, f"the run directory {str(directory)!r} is gone")

    def make_directory(self, path: Path, below: Path | None = None) -> bool:
        """Make a directory and its missing parents; return whether this call made it, raise OSError if it failed.

        Args:
            below: a directory that may be anything; what is under it must be real directories, and no links, which
                somebody else may have laid.
        """
        self._require_home(path)
        missing, made = [], False
        at = path
        while not at.is_dir() and at != at.parent:
            missing.append(at)
            at = at.parent
        for one in reversed(missing):
            with suppress(FileExistsError):  # another rank was quicker, or it is a file, as the next call says
                inside = one == path or (below is not None and below in one.parents)
                one.mkdir(mode=0o777 if self._mode is None or not inside else self._directory_mode())
                made = one == path
                if inside and self._mode not in {None, PRIVATE}:
                    one.chmod(self._directory_mode())
            if not one.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{str(one)!r} is no directory")
        while below is not None and path != below and below in path.parents:
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{str(path)!r} is a link; files are not written through it")
            path = path.parent
        return made

    def open(self, path: Path, flags: int) -> io.FileIO:
        """Open a file for writing with os.open's flags; a link in its place is not followed."""
        return io.FileIO(self.descriptor(path, flags), "ab" if flags & os.O_APPEND else "wb")

    def descriptor(self, path: Path, flags: int) -> int:
        """Open a file for writing as `open` does, and return its descriptor, for `Kept`."""
        self._require_home(path)
        mode = 0o666 if self._mode is None else PRIVATE
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        try:
            _require_regular(descriptor, path)
            if self._mode not in {None, PRIVATE}:
                os.fchmod(descriptor, self._mode or PRIVATE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, path: Path) -> io.FileIO:
        """Open a new file, or an old one emptied."""
        return self.open(path, os.O_WRONLY | os.O_TRUNC)

    def append(self, path: Path, data: bytes) -> None:
        """Append bytes to a file, all or none; raise OSError if that fails."""
        with self.open(path, os.O_WRONLY | os.O_APPEND) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                write_all(file.fileno(), data)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), before)
                raise

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file; delete it if the write fails."""
        with self.create(path) as file:
            try:
                write_all(file.fileno(), data)
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise

    def replace(self, path: Path, parts: Iterable[bytes]) -> None:
        """Replace a file atomically: readers see the old or the new content, never a part."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with self.open(temporary, os.O_WRONLY | os.O_EXCL) as file:
                for part in parts:
                    write_all(file.fileno(), part)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _directory_mode(self) -> int:
        mode = PRIVATE if self._mode is None else self._mode
        return mode | (mode & 0o444) >> 2


def mode_of(setting: str) -> int | None:
    """Return the permissions for a value of the setting `file_mode`; raise ValueError for anything else.

    `private` is 0600, `umask` is None, others are octal: the owner must be able to read and write, and nothing that
    ddpdebug writes is executable.
    """
    named = {"private": PRIVATE, "umask": None}
    if setting in named:
        return named[setting]
    mode = int(setting.removeprefix("0o"), 8) if setting.isascii() else -1
    if mode & ~0o666 or mode & 0o600 != 0o600:
        raise ValueError(f"{setting!r} is no mode of a file that its owner can read and write")
    return mode


def _require_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"{str(path)!r} is no regular file")


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


#: Descriptors that stay open have numbers from here on, so that the script's are the lowest, as without us.
_FIRST = 512


def moved_up(descriptor: int) -> int:
    """Duplicate a descriptor to a high number and close the old one; keep the old one if the limit is too low."""
    try:
        higher = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:
        return descriptor
    os.close(descriptor)
    return higher


def socket_up(given: socket.socket) -> socket.socket:
    """Return a socket whose descriptor has a high number."""
    return socket.socket(fileno=moved_up(given.detach()))


class Kept:
    """A descriptor that stays open, used only while its number still leads to the file that was opened."""

    def __init__(self, number: int) -> None:
        self.number, self._is = number, _identity(os.fstat(number))

    def __bool__(self) -> bool:
        try:
            return self.number >= 0 and _identity(os.fstat(self.number)) == self._is
        except OSError:
            return False

    def write(self, data: bytes) -> bool:
        """Write all bytes; return False if the descriptor's number belongs to another file by now."""
        if not self:
            return False
        write_all(self.number, data)
        return True

    def close(self) -> None:
        """Close the descriptor, unless its number belongs to another file by now."""
        if self:
            os.close(self.number)
        self.number = -1


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor."""
    view = memoryview(data)
    with without_signals():  # SIGXFSZ
        while view:
            view = view[os.write(descriptor, view) :]


class Ballast:
    """A small file that is deleted on a full disk, to make space for a finding or for the outcome of a run."""

    def __init__(self, disk: Disk, path: Path, size: int) -> None:
        self._disk, self._path, self._size = disk, path, size

    def take(self) -> None:
        """Write the file; do nothing if the disk is full already."""
        with suppress(OSError):
            self._disk.write(self._path, os.urandom(_BLOCK) * (self._size // _BLOCK))

    def drop(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self._path.unlink()


class Volumes:
    """The free space of file systems (statvfs); of those in memory, no more than the free memory."""

    def __init__(self) -> None:
        self._in_memory: dict[int, bool] = {}  # by the number of the device

    def __call__(self, path: Path) -> Free:
        """Return what the file system of a path (or of the nearest directory above it that exists) has left.

        A file system in memory (/dev/shm) has no more than the memory that is free.
        """
        at = path
        while True:
            try:
                found = os.statvfs(at)
                break
            except FileNotFoundError:
                if at == at.parent:
                    raise
                at = at.parent
        size = found.f_bavail * found.f_frsize
        if self.in_memory(at):
            size = min([size, *free_memory()])
        files = found.f_favail if found.f_files else None
        return Free(size, found.f_blocks * found.f_frsize, files)

    def in_memory(self, path: Path) -> bool:
        """Whether a path lies on a file system in memory (tmpfs, ramfs)."""
        device = path.stat().st_dev
        if device not in self._in_memory:
            self._in_memory[device] = _kind_of(device) in {"tmpfs", "ramfs"}
        return self._in_memory[device]


def kind_of(path: Path) -> str:
    """Return the type of a path's file system, "ext4" or "nfs4"; empty if unknown."""
    return _kind_of(path.stat().st_dev)


def _kind_of(device: int) -> str:
    place = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split()[2] == place:
                return line.partition(" - ")[2].split()[0]
    return ""


def free_memory() -> list[int]:
    """Return the free memory of the machine and of the control group, in bytes, as far as known."""
    return [*_free_memory(), *_group_memory()]


def _free_memory() -> list[int]:
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return []


def _group_memory() -> list[int]:
    """Return what the control group may still use, where it has a limit."""
    base = Path("/sys/fs/cgroup")
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    found = []
    for limit, used in pairs:
        with suppress(OSError, ValueError):
            found.append(max(0, int((base / limit).read_text("utf-8")) - int((base / used).read_text("utf-8"))))
    return found


def _file_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
