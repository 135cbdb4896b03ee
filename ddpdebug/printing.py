"""Printing on standard error: in order with the script's lines, and never left in the stream's buffer.

What stays in the buffer of a stream that cannot be written, on a full disk for example, makes the interpreter exit with
status 120.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from contextlib import suppress
from typing import Any

_UNWRITABLE = (OSError, ValueError, AttributeError)  # ValueError: it is closed; AttributeError: there is none


def say(text: str) -> None:
    """Print a text on standard error; do nothing if that cannot be written."""
    with suppress(*_UNWRITABLE):
        write(sys.stderr, fresh_line(sys.stderr) + text)


def write(stream: Any, text: str) -> None:
    """Write a text to a stream, past its buffer if it is an ordinary text stream; raise what a write raises."""
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) not in {io.BufferedWriter, io.FileIO}:
        stream.write(text)
        stream.flush()
        return
    with suppress(OSError):  # what the script has printed comes first
        stream.flush()
    rest = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while rest:
        rest = rest[os.write(stream.fileno(), rest) :]


def fresh_line(stream: Any) -> str:
    """Return a newline if a stream that is no terminal stands in the middle of a line, else an empty text.

    tqdm ends none of its lines before its bar is full. What a file ends with can be read; of a pipe it is only known
    that a bar of this process is open.
    """
    with suppress(*_UNWRITABLE):
        if stream.isatty():
            return ""
        stream.flush()
        end = _last_byte(stream.fileno())
        if end is not None:
            return "" if end in {b"", b"\n"} else "\n"
        bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
        return "\n" if len(bars) else ""
    return ""


def _last_byte(descriptor: int) -> bytes | None:
    """Return the last byte of a regular file, empty where there is none; None of anything else."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        return None
    reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(reading, 1, max(0, about.st_size - 1))
    finally:
        os.close(reading)
