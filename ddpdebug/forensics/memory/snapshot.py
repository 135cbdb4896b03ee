"""A snapshot of CUDA's caching allocator: the source lines that allocated the living blocks. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ddpdebug.isolation.user_code import is_user_file, shorten

_MAX_LINES = 8


def by_line(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of living blocks by the user's line that allocated them, the largest first."""
    sizes = Counter[str]()
    for block in _blocks(snapshot):
        if str(block.get("state", "")).startswith("active"):
            sizes[_line(block)] += _int(block.get("size"))
    return dict(sizes.most_common(_MAX_LINES))


_UNKNOWN = "unknown"


def _line(entry: Mapping[str, Any]) -> str:
    """Return the innermost line of the user's in an entry's stack."""
    frames = [f for f in _dicts(entry.get("frames")) if isinstance(f.get("filename"), str)]
    for frame in frames:
        if is_user_file(frame["filename"]) and frame["filename"].endswith(".py"):
            return f"{shorten(frame['filename'])}:{_int(frame.get('line'))}"
    return f"{frames[0]['filename']}:{_int(frames[0].get('line'))}" if frames else _UNKNOWN


def _blocks(snapshot: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for segment in _dicts(snapshot.get("segments")):
        yield from _dicts(segment.get("blocks"))


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list | tuple) else []


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
