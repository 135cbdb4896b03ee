"""Printing on standard error: in order with the script's lines, and never left in the stream's buffer.

What stays in the buffer of a stream that cannot be written, on a full disk for example, makes the interpreter exit with
status 120. In a job's process nothing waits long for somebody to read, and no signal comes of a write: a job that is
silent itself would not notice that nobody reads, that its terminal is stopped, or that it is not in its foreground.
"""

from __future__ import annotations

import io
import math
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ddpdebug.clock import time
from ddpdebug.signals import without_signals

#: Seconds that a job's process waits for a reader, in all; a pipe that can be written takes so many bytes at once.
_SECONDS, _PIECE = 1.0, select.PIPE_BUF
_ERRORS = 2
#: Seconds until a terminal is asked again.
_AGAIN = 0.01
_UNWRITABLE = (OSError, ValueError, AttributeError)  # ValueError: it is closed; AttributeError: there is none


def say(text: str) -> None:
    """Print a text on standard error; do nothing if that cannot be written."""
    with suppress(*_UNWRITABLE):
        stream = standard_error()
        write(stream, fresh_line(stream) + text)


class _Job:
    """How much longer this process may wait until what it says is read, and to what its descriptor 2 led at first."""

    seconds = math.inf
    begins: tuple[object, ...] = ()
    is_launched = False


def be_brief() -> None:
    """Wait for readers no longer than a job may be held up: this process is one, or is about to become one."""
    _Job.seconds = min(_Job.seconds, _SECONDS)
    _Job.begins = _Job.begins or (file_of(_ERRORS),)


def be_launched(begins: tuple[int, int] | None) -> None:
    """Print past what the script puts in the place of `sys.stderr`: this process is one that ddpdebug has started.

    Args:
        begins: the file of descriptor 2 before the script's first line.
    """
    _Job.is_launched, _Job.begins = True, (begins,)


def standard_error() -> Any:
    """Return the stream for what is said: the interpreter's own, or the one of a notebook or test that watches."""
    return sys.__stderr__ if _Job.is_launched else sys.stderr


def file_of(descriptor: int) -> tuple[int, int] | None:
    """Return the device and number of the file that a descriptor leads to; None if it is closed."""
    try:
        about = os.fstat(descriptor)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _has_moved(descriptor: int) -> bool:
    """Whether descriptor 2 leads elsewhere than at first: to what the script has put there, or opened after a close."""
    return descriptor == _ERRORS and bool(_Job.begins) and file_of(descriptor) not in _Job.begins


def write(stream: Any, text: str) -> None:
    """Write a text to a stream, past its buffer if it is an ordinary text stream; raise what a write raises.

    In a job's process the rest is dropped where nobody reads.
    """
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) not in {io.BufferedWriter, io.FileIO}:
        stream.write(text)
        stream.flush()
        return
    _flush(stream)  # what the script has printed comes first
    put(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))


def put(descriptor: int, data: bytes) -> None:
    """Write bytes to a descriptor as `write` does."""
    if _has_moved(descriptor):
        return
    rest, until = memoryview(data), time.monotonic() + _SECONDS
    with without_signals(), _never_blocking(descriptor) as open_one:
        while rest and _takes_more(open_one):
            try:
                rest = rest[os.write(open_one, rest[:_PIECE]) :]
            except BlockingIOError:  # a terminal that has room, and not enough for the end of a line
                if _Job.seconds == math.inf:
                    raise
                if time.monotonic() > until:
                    return
                time.sleep(_AGAIN)


@contextmanager
def _never_blocking(descriptor: int) -> Iterator[int]:
    """Yield a descriptor of the same pipe or terminal whose writes return at once; what others hold stays as it is."""
    own = descriptor
    kind = os.fstat(descriptor).st_mode
    if _Job.seconds < math.inf and (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
        with suppress(OSError):  # another user's terminal, say: a piece of it fits as a rule
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
    try:
        yield own
    finally:
        if own != descriptor:
            os.close(own)


def _flush(stream: Any) -> None:
    """Write what a stream keeps; in a job's process only to a file, as it may be more than a pipe takes at once."""
    with suppress(OSError), without_signals():
        if _Job.seconds == math.inf or stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()


def _takes_more(descriptor: int) -> bool:
    """Return whether a descriptor can be written now, or soon enough."""
    if _Job.seconds == math.inf:
        return True
    ready, began = select.poll(), time.monotonic()
    ready.register(descriptor, select.POLLOUT)
    found = ready.poll(max(0.0, _Job.seconds) * 1000)
    _Job.seconds = _SECONDS if found else _Job.seconds - (time.monotonic() - began)
    return bool(found)


def fresh_line(stream: Any) -> str:
    """Return a newline if a stream that is no terminal stands in the middle of a line, else an empty text.

    tqdm ends none of its lines before its bar is full. What a file ends with can be read; of a pipe it is only known
    that a bar of this process is open.
    """
    with suppress(*_UNWRITABLE):
        if stream.isatty():
            return ""
        _flush(stream)
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
