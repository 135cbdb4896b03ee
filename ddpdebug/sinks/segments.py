"""A file that grows without growing out of bounds: the beginning and the newest part stay. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path


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
    """Appends records to numbered files; when all together exceed `cap` bytes the oldest but the first is deleted.

    A record is handed to the operating system at once, so that it survives the death of the process, and never spans
    two files.

    Args:
        header: gives the bytes that a new file begins with.
    """

    def __init__(self, first: Path, *, cap: int, header: Callable[[], bytes] = bytes, parts: int = 8) -> None:
        self._first = first
        self._limit = max(1, cap // parts)
        self._keep = parts
        self._header = header
        self._number = -1
        self._size = 0
        self._file: FileIO | None = None

    def append(self, record: bytes) -> None:
        """Write one record; raise OSError when that fails. One that is larger than a whole file is left out."""
        if len(record) > self._limit:
            return
        file = self._file
        if file is None or self._size + len(record) > self._limit:
            file = self._next()
        written = file.write(record)
        if written != len(record):  # a full disk may take a part
            raise OSError(f"only {written} of {len(record)} bytes were written to {self._first.parent}")
        self._size += written

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> FileIO:
        self.close()
        self._number += 1
        header = self._header()
        self._file = file = segment_path(self._first, self._number).open("wb", buffering=0)
        self._size = file.write(header)
        dropped = self._number - self._keep + 1
        if dropped > 0:
            segment_path(self._first, dropped).unlink(missing_ok=True)
        return file
