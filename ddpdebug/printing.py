"""What ddpdebug prints on standard error: in order with the script's lines, and never left in the stream's buffer.

What stays in the buffer of a stream that cannot be written, on a full disk for example, makes the interpreter exit with
status 120.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

_UNWRITABLE = (OSError, ValueError, AttributeError)  # ValueError: it is closed; AttributeError: there is none


def say(text: str) -> None:
    """Print on standard error; where that cannot be written nothing happens."""
    with suppress(*_UNWRITABLE):
        write(sys.stderr, text)


def write(stream: Any, text: str) -> None:
    """Write a text to a stream, past its buffer where it is the interpreter's kind; raise what a write raises."""
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) not in {io.BufferedWriter, io.FileIO}:
        stream.write(text)
        stream.flush()
        return
    with suppress(OSError):  # what the script has printed comes first
        stream.flush()
    rest = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while rest:
        rest = rest[os.write(stream.fileno(), rest) :]
