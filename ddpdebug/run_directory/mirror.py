"""The files of a run directory that a hub mirrors, and their transfer in pieces. Standard library only, never writes.

Nothing is kept beside the directory: the other side says what it has of each file (its size and a CRC-32), and what
comes next follows from that. So whoever mirrors, and the hub, may be killed and started anew at any point, and a piece
may come twice. Files belong to whom the run does, who may be anybody: links are not followed, sizes are bounded.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ddpdebug.clock import time
from ddpdebug.schema.run_state import run_key

RUN = "run.json"
#: A document that only the mirror has: where the run directory is, and what lies in it that is too large to travel.
BUNDLES = "bundles.json"
#: Bytes of a file that is replaced as a whole, of one that grows, and of all pieces of a batch.
MAX_DOCUMENT, MAX_FILE, BATCH = 2 << 20, 64 << 20, 2 << 20
_RANK = r"ranks/(?:0|[1-9]\d{0,6})/"
_GROWING = re.compile(
    rf"(?:steps(?:\.\d{{5,9}})?\.bin|observations(?:\.\d{{5,9}})?\.jsonl|findings\.jsonl|{_RANK}(?:findings|trouble)\.jsonl)",
    re.ASCII,
)
_SEGMENT = re.compile(r"(?:steps|observations)\.\d+\.\w+")  # the oldest are deleted while the run goes on
_DOCUMENT = re.compile(
    rf"(?:run|check|ends|bundles)\.json|{_RANK}(?:(?:place|outcome|stacks)\.json|stacks\.txt)", re.ASCII
)
_OF_RANK = ("place.json", "outcome.json", "findings.jsonl", "trouble.jsonl", "stacks.json", "stacks.txt")
_MAX_RANKS, _MAX_BUNDLES = 1 << 16, 1000
#: Folders of so many ranks are looked into each second, on file systems that many share.
_RANKS_A_SECOND = 32


def is_document(path: str) -> bool | None:
    """Whether a file is replaced as a whole (True) or appended to (False); None for a path that is not mirrored."""
    return True if _DOCUMENT.fullmatch(path) else False if _GROWING.fullmatch(path) else None


def key_of(run: Mapping[str, Any]) -> str:
    """Return the key of a run in a hub; raise ValueError if `run.json` has no run id or no time."""
    key = run_key(run.get("time"), run.get("run"))
    if not key:
        raise ValueError(f"its {RUN} names no run and no time")
    return key


class Piece(NamedTuple):
    """Bytes of a file from `start` on; `replace` empties the file first, `gone` deletes it."""

    path: str
    start: int = 0
    data: bytes = b""
    replace: bool = False
    gone: bool = False

    def beyond(self, size: int) -> bytes | None:
        """Return the bytes that a file of `size` bytes lacks; None if there is a gap between file and piece."""
        return self.data[size - self.start :] if self.start <= size else None


class Held(NamedTuple):
    """Size and digest of a file as the receiver has it."""

    size: int
    digest: str


def digest_of(data: bytes, before: str = "00000000") -> str:
    """Return the CRC-32 of data appended to bytes with the digest `before`."""
    return f"{zlib.crc32(data, int(before, 16)):08x}"


def encode(key: str, source: str, pieces: Sequence[Piece], *, all_files: bool = False) -> bytes:
    """Return a batch as it is posted: compressed lines of JSON.

    Args:
        source: `push`, `watch` or `import`.
        all_files: the answer is to name all files of the run, and not only those of the batch.
    """
    lines: list[dict[str, Any]] = [{"run": key, "from": source, "all": all_files}]
    for piece in pieces:
        flags = {name: True for name in ("replace", "gone") if getattr(piece, name)}
        data = base64.b64encode(piece.data).decode()
        lines.append({"path": piece.path, "start": piece.start, "data": data, **flags})
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), 1)


class Mirror:
    """The sender of a mirrored run directory.

    Args:
        directory: of a run; a link in the place of a file, or of a folder below it, is as if there were nothing.

    Raises:
        ValueError: it is not the directory of a run.
        OSError: it cannot be read.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.run = self._read_run()
            self.key = key_of(self.run)
        except BaseException:
            self.close()
            raise
        self._met = False
        self._there: dict[str, Held] = {}  # what the other side has
        self._read: dict[str, tuple[int, Held]] = {}  # the file's number, and what was read of it so far
        self._done: dict[str, tuple[int, ...]] = {}  # the file as it was when all of it was there
        # what should be there after this batch, or not any more
        self._sent: dict[str, tuple[Held | None, tuple[int, ...] | None]] = {}
        self._unwanted: set[str] = set()
        self._lost: dict[str, Held] = {}  # what was there, until the other side said that it is not
        self._bundles = b""
        self._next_ranks = clock()  # when the folders of the ranks are looked into again
        self._run_as_read: tuple[int, ...] | None = None

    def close(self) -> None:
        """Close the directory."""
        os.close(self._root)

    @property
    def changed(self) -> float:
        """The time of the last write, seconds since the epoch by the file system's clock."""
        times = [0.0]
        for path in [*self._paths(), *self._paths_of_ranks()]:
            with suppress(OSError):
                times.append(os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mtime)
        return max(times)

    def learn(self, files: Mapping[str, Held]) -> bool:
        """Record the receiver's files; return whether it has everything that was sent."""
        fine = True
        for path, (held, complete) in self._sent.items():
            if files.get(path) != held:
                fine = False
                self._read.pop(path, None)
                if path not in files and path in self._there:  # it may have lost all that it had
                    self._lost[path], self._met = self._there.pop(path), False
                elif path not in files:
                    self._unwanted.add(path)
            elif held is None:
                self._there.pop(path, None)
            elif complete is not None:
                self._done[path] = complete
        self._sent.clear()
        self._there.update(files)
        return fine

    def _meet(self, files: Mapping[str, Held]) -> None:
        """Begin with what the other side has of all files: it may be another one than before."""
        for path in [path for path in self._done if files.get(path) != self._there.get(path, self._lost.get(path))]:
            del self._done[path]
        # what it has as before, and did not name when it was given more, is full
        self._unwanted |= {path for path, held in self._lost.items() if files.get(path) == held}
        self._lost.clear()
        self._there, self._met, self._next_ranks = dict(files), True, self._clock()

    def greet(self, send: Callable[[Sequence[Piece], bool], Mapping[str, Held]]) -> None:
        """Send an empty piece as a sign of life: the answer shows whether the receiver has everything."""
        held = self._there.get(RUN)
        self._sent = {} if held is None else {RUN: (held, None)}
        self.learn(send([] if held is None else [Piece(RUN, held.size)], False))

    def bring(self, send: Callable[[Sequence[Piece], bool], Mapping[str, Held]]) -> int:
        """Send everything that the receiver lacks and accepts; return the number of pieces.

        Args:
            send: sends pieces, and returns what the other side has then: of these files, or of all of the run's.
        """
        sent, fine = 0, True
        while True:
            if not self._met:
                self._meet(send([], True))
            if not (pieces := self.pieces()):
                return sent
            before, fine = fine, self.learn(send(pieces, False))
            sent += len(pieces)
            if not fine and not before:  # somebody else brings it as well: what it comes to is seen later
                return sent

    def verify(self) -> None:
        """Compare all files from their beginning at the next call of `pieces`."""
        self._done.clear()
        self._read.clear()
        self._unwanted.clear()
        self._next_ranks, self._met = self._clock(), False

    def pieces(self, room: int = BATCH) -> list[Piece]:
        """Return the next pieces, of at most about `room` bytes; empty if the receiver has everything.

        Raises:
            ValueError: another run has the directory now, or nobody.
            OSError: it cannot be read.
        """
        self._look()
        self._sent.clear()  # of a batch that did not arrive nothing is known
        paths = self._paths()
        found = [Piece(path, gone=True) for path in self._there.keys() - paths if _SEGMENT.fullmatch(path)]
        self._sent |= {piece.path: (None, None) for piece in found}
        look = self._clock() >= self._next_ranks
        if look:
            self._bundles = self._listing()
            of_ranks = list(self._paths_of_ranks())
            paths += [BUNDLES, *of_ranks]
        for path in paths:
            piece = None if path in self._unwanted else self._piece(path, room)
            if piece is None:
                continue
            if len(piece.data) > room and found:
                del self._sent[path]
                return found
            found.append(piece)
            room -= len(piece.data) + 100
            if room <= 0:
                return found
        if look:
            self._next_ranks = self._clock() + len(of_ranks) / len(_OF_RANK) / _RANKS_A_SECOND
        return found

    def _look(self) -> None:
        """Notice another run in this directory."""
        try:
            signature = _signature(os.stat(RUN, dir_fd=self._root, follow_symlinks=False))
        except FileNotFoundError:
            raise ValueError("its directory has gone") from None
        if signature != self._run_as_read:
            if key_of(run := self._read_run()) != self.key:
                raise ValueError("another run has its directory now")
            self.run, self._run_as_read = run, signature

    def _read_run(self) -> dict[str, Any]:
        with suppress(RecursionError, ValueError), self._open(RUN) as file:
            run = json.loads(file.read(MAX_DOCUMENT))
            if isinstance(run, dict):
                return run
        raise ValueError(f"it has no readable {RUN}")

    def _paths(self) -> list[str]:
        """Return the files that are mirrored, those first that say most in the fewest bytes."""
        with os.scandir(self._root) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        top = sorted(name for name in names if name != BUNDLES and is_document(name) is not None)
        top.sort(key=lambda name: (name != RUN, not name.startswith("findings"), not is_document(name)))
        return top

    def _paths_of_ranks(self) -> Iterator[str]:
        for number in self._folders("ranks")[:_MAX_RANKS]:
            if number.isascii() and number.isdecimal():
                yield from (path for name in _OF_RANK if is_document(path := f"ranks/{number}/{name}") is not None)

    def _folders(self, path: str) -> list[str]:
        with suppress(OSError):
            folder = self._walk(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
                return sorted((name for name in names if not name.startswith(".")), key=lambda name: (len(name), name))
            finally:
                os.close(folder)
        return []

    def _listing(self) -> bytes:
        folders = ["bundles", *(f"ranks/{number}/bundles" for number in self._folders("ranks")[:_MAX_RANKS])]
        found = [f"{folder}/{name}" for folder in folders for name in self._folders(folder)][:_MAX_BUNDLES]
        document = {"directory": str(self._directory.absolute()), "bundles": found}
        return json.dumps(document).encode()

    def _walk(self, path: str, flags: int) -> int:
        """Open what a path names below the directory, without following a link anywhere."""
        at = os.dup(self._root)
        for name in path.split("/")[:-1]:
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            finally:
                os.close(at)
            at = below
        try:
            return os.open(path.rpartition("/")[2], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)

    def _open(self, path: str) -> Any:
        file = os.fdopen(self._walk(path, os.O_RDONLY), "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(f"{path!r} is no regular file")
        return file

    def _piece(self, path: str, room: int) -> Piece | None:
        with suppress(OSError):  # it is not there, or not for us
            return self._next(path, room)
        return None

    def _next(self, path: str, room: int) -> Piece | None:
        if path == BUNDLES:
            return self._whole(path, self._bundles, (hash(self._bundles),))
        signature = _signature(os.stat(path, dir_fd=self._root, follow_symlinks=False))
        number, size = signature[:2]
        if self._done.get(path) == signature or size > (MAX_DOCUMENT if is_document(path) else MAX_FILE):
            return None
        with self._open(path) as file:
            if is_document(path):
                return self._whole(path, file.read(MAX_DOCUMENT), signature)
            there = self._there.get(path, Held(0, digest_of(b"")))
            goes_on = size >= there.size and (
                self._read.get(path) == (number, there) or _digest_of_file(file, there.size) == there.digest
            )
            start, before = (there.size, there.digest) if goes_on else (0, digest_of(b""))
            file.seek(start)
            data = file.read(min(room, size - start))
            held = Held(start + len(data), digest_of(data, before))
            self._read[path] = (number, held)
            if goes_on and not data and path in self._there:
                self._done[path] = signature
                return None
            self._sent[path] = (held, signature if held.size >= size else None)
            return Piece(path, start, data, replace=not goes_on)

    def _whole(self, path: str, data: bytes, signature: tuple[int, ...]) -> Piece | None:
        held = Held(len(data), digest_of(data))
        if self._there.get(path) == held or self._done.get(path) == signature:
            self._done[path] = signature
            return None
        self._sent[path] = (held, signature)
        return Piece(path, 0, data, replace=True)


def _signature(info: os.stat_result) -> tuple[int, ...]:
    return info.st_ino, info.st_size, info.st_mtime_ns


def _digest_of_file(file: Any, size: int) -> str:
    """Return the digest of a file's first bytes."""
    digest = digest_of(b"")
    file.seek(0)
    while size > 0 and (data := file.read(min(size, 1 << 20))):
        digest, size = digest_of(data, digest), size - len(data)
    return digest
