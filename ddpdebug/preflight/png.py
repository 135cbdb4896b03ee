"""Makes a PNG of rows of pixels with the standard library. Pure."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

#: A sample is shown at most this wide and high; of a larger one every second, third, ... pixel is taken.
MAX_SIDE = 256
_KINDS = {1: 0, 3: 2}  # channels to PNG's colour types: grey, RGB

Pixels = Sequence[Sequence[Sequence[int]]]


def png(pixels: Pixels) -> bytes | None:
    """Return the file, or None where the pixels are no picture (no rows, uneven rows, two channels)."""
    height = len(pixels)
    width = len(pixels[0]) if height else 0
    channels = len(pixels[0][0]) if width else 0
    if channels not in _KINDS or any(len(row) != width or any(len(p) != channels for p in row) for row in pixels):
        return None
    stride = max(1, -(-max(width, height) // MAX_SIDE))
    rows = [row[::stride] for row in pixels[::stride]]
    lines = b"".join(b"\0" + bytes(max(0, min(255, int(v))) for pixel in row for v in pixel) for row in rows)
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, _KINDS[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_uri(image: bytes) -> str:
    """Return what stands in a page in place of a file."""
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"
