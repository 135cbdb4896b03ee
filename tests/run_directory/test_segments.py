"""Bounded files keep their beginning and their newest part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddpdebug.run_directory.segments import Segments, segment_paths


def test_the_first_and_the_newest_records_stay(tmp_path: Path) -> None:
    """All files together never exceed the cap."""
    first = tmp_path / "rows.bin"
    segments = Segments(first, cap=800, header=lambda: b"head")
    for i in range(1000):
        segments.append(b"%016d" % i)
        assert sum(path.stat().st_size for path in segment_paths(first)) <= 800
    segments.close()
    paths = segment_paths(first)
    assert len(paths) == 8
    assert all(path.read_bytes().startswith(b"head") for path in paths)
    numbers = [int(path.read_bytes()[4:][i : i + 16]) for path in paths for i in range(0, path.stat().st_size - 4, 16)]
    assert numbers[:6] == list(range(6))
    assert numbers[6:] == list(range(numbers[6], 1000))


def test_a_record_is_readable_at_once(tmp_path: Path) -> None:
    """Nothing waits in a buffer for a process that may be killed."""
    segments = Segments(tmp_path / "a.jsonl", cap=100)
    segments.append(b"{}\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"{}\n"
    segments.close()


def test_a_record_larger_than_a_file_is_left_out(tmp_path: Path) -> None:
    """It would break the bound."""
    segments = Segments(tmp_path / "a.jsonl", cap=80)
    segments.append(b"x" * 81)
    assert segment_paths(tmp_path / "a.jsonl") == []


def test_a_write_that_fails_leaves_nothing_of_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may be tried, and begins a new file."""
    segments = Segments(tmp_path / "a.bin", cap=800, header=lambda: b"head")
    segments.append(b"first")

    def half(descriptor: int, data: bytes) -> int:
        os.pwrite(descriptor, bytes(data)[:3], 9)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            segments.append(b"second")
        with pytest.raises(OSError, match="No space left"):
            segments.append(b"third")
    segments.append(b"fourth")
    segments.close()
    assert [path.read_bytes() for path in segment_paths(tmp_path / "a.bin")] == [b"headfirst", b"headfourth"]
