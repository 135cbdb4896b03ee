"""Parsing of batches that are posted to the hub: compressed lines of JSON, within fixed bounds."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, NamedTuple

from ddpdebug.run_directory.mirror import BATCH, Piece

#: Bytes of a body as it comes, and as it is read.
MAX_BODY, MAX_UNPACKED = 4 << 20, 8 << 20
#: Lines of a batch, and characters of a path.
_MAX_LINES, _MAX_PATH = 20_000, 200
#: Bytes of a line, and commas: a list of a million lists is a hundred times as large in memory, and no line needs one.
_MAX_LINE, _MAX_COMMAS = 2 * BATCH * 4 // 3 + 1024, 200


class BadBatchError(Exception):
    """A posted body is no batch; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Batch(NamedTuple):
    """Pieces of a run's files; `all_files` asks for an answer about all files of the run."""

    run: str
    source: str
    pieces: list[Piece]
    all_files: bool


def unpack(body: bytes) -> bytes:
    """Decompress a gzip body; raise BadBatchError if it is too large or malformed."""
    reader = zlib.decompressobj(wbits=31)
    try:
        data = reader.decompress(body, MAX_UNPACKED + 1)
    except zlib.error:
        raise BadBatchError(400, "the body is not compressed with gzip") from None
    if len(data) > MAX_UNPACKED:
        raise BadBatchError(413, f"a batch may have {MAX_UNPACKED} bytes")
    if not reader.eof:
        raise BadBatchError(400, "the body is cut off")
    return data


def parse(body: bytes, run: str) -> Batch:
    """Return the batch in a body that was posted for a run.

    Raises:
        BadBatchError: it is none, or that of another run.
    """
    head, *lines = unpack(body).split(b"\n", _MAX_LINES)
    if len(lines) == _MAX_LINES:
        raise BadBatchError(413, f"a batch may have {_MAX_LINES} lines")
    about = _object(head, 1)
    if about.get("run") != run:
        raise BadBatchError(400, "the batch is that of another run than its address")
    source = about.get("from")
    pieces = [_piece(_object(line, number), number) for number, line in enumerate(lines, 2) if line]
    return Batch(run, source if source in {"push", "import"} else "push", pieces, about.get("all") is True)


def _object(line: bytes, number: int) -> dict[str, Any]:
    if len(line) > _MAX_LINE:
        raise BadBatchError(413, f"line {number} has more than {_MAX_LINE} bytes")
    if line.count(b",") > _MAX_COMMAS:
        raise BadBatchError(413, f"line {number} has more than {_MAX_COMMAS} commas")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadBatchError(400, f"line {number} is no JSON object")
    return value


def _piece(line: dict[str, Any], number: int) -> Piece:
    path, start, data = line.get("path"), line.get("start", 0), line.get("data", "")
    if not isinstance(path, str) or len(path) > _MAX_PATH or type(start) is not int or not 0 <= start < 1 << 40:
        raise BadBatchError(400, f"line {number} names no place in a file")
    try:
        content = base64.b64decode(data, validate=True)
    except (ValueError, TypeError):
        raise BadBatchError(400, f"the data of line {number} are not in base64") from None
    if len(content) > 2 * BATCH:
        raise BadBatchError(413, f"line {number} has more than {2 * BATCH} bytes")
    return Piece(path, start, content, replace=line.get("replace") is True, gone=line.get("gone") is True)
