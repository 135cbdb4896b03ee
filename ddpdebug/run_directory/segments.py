"""Segmented append-only files with a size limit: the first segment and the newest ones stay. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ddpdebug.disk import Disk, Kept, moved_up, write_all

#: So many files are kept, each as large as its share of the cap.
_FILES = 8


def segment_path(first: Path, number: int) -> Path:
    """Return the path of a segment: `steps.bin`, `steps.00001.bin`, ..."""
    return first if number == 0 else first.with_name(f"{first.stem}.{number:05d}{first.suffix}")


def segment_paths(first: Path) -> list[Path]:
    """Return the existing segments, oldest first."""
    later = sorted(
        (path for path in first.parent.glob(f"{first.stem}.*{first.suffix}") if path.suffixes[0][1:].isdecimal()),
        key=lambda path: int(path.suffixes[0][1:]),
    )
    return [path for path in (first, *later) if path.is_file()]


class Segments:
    """Appends records to numbered files; beyond `cap` bytes in all, the oldest file but the first is deleted.

    A record is handed to the operating system at once, so that it survives the death of the process, and never spans
    two files.

    A record for which the disk has no room, or a whole file has none, is left out: the next one begins a new file. So
    does one that finds the file closed by the script.

    Args:
        header: gives the bytes that a new file begins with.
        disk: says whether there is room, and for `what`.
    """

    def __init__(
        self,
        first: Path,
        *,
        cap: int,
        header: Callable[[], bytes] = bytes,
        disk: Disk | None = None,
        what: str = "rows",
    ) -> None:
        self._first = first
        self._limit = max(1, cap // _FILES)
        self._header = header
        self._disk, self._what = disk or Disk(), what
        self._number = -1
        self._size = 0
        self._file: Kept | None = None

    def append(self, record: bytes, *, must: bool = False) -> str | None:
        """Write one record; return the reason if it was left out, and raise OSError if writing fails.

        After a failure nothing of the record is there, and the next one may be tried. What `must` be written is tried
        even where the room is left to the job.
        """
        if len(record) > self._limit:
            return f"a record of {len(record)} bytes is larger than a file may be"
        refusal = None if must else self._disk.refusal(self._first.parent, len(record), self._what)
        if refusal is not None:
            self.close()
            return refusal
        file = self._file
        if not file or self._size + len(record) > self._limit:
            file = self._next()
        try:
            write_all(file.number, record)
        except OSError:
            os.ftruncate(file.number, self._size)  # a full disk may take a part
            self.close()
            raise
        self._size += len(record)
        return None

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> Kept:
        self.close()
        path = segment_path(self._first, self._number + 1)
        header = self._header()
        self._disk.write(path, header)
        file = Kept(moved_up(self._disk.descriptor(path, os.O_WRONLY | os.O_APPEND)))
        self._number, self._file, self._size = self._number + 1, file, len(header)
        dropped = self._number - _FILES + 1
        if dropped > 0:
            segment_path(self._first, dropped).unlink(missing_ok=True)
        return file
