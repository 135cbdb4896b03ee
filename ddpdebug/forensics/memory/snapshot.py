"""Reads snapshots of CUDA's caching allocator: who allocated what is there, and how fragmented it is. Torch-free.

A snapshot is a pickle, and a pickle runs what it likes when it is read: this reader takes plain containers and scalars
only, and refuses everything that names a class or a function.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddpdebug.detectors.mem.growth import size_text
from ddpdebug.errors import UsageError
from ddpdebug.isolation.user_code import is_user_file, shorten
from ddpdebug.sinks.text import clean

_MAX_LINES = 8
#: Free pieces of segments in use, as a share of what is reserved, from which a snapshot counts as fragmented.
_FRAGMENTED = 0.15


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, texts and numbers; nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot holds plain data only")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read(path: Path) -> Mapping[str, Any]:
    """Return the snapshot in a file.

    Raises:
        UsageError: the file cannot be read, or is no snapshot.
    """
    try:
        with path.open("rb") as file:
            value = _PlainUnpickler(file).load()
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - a broken pickle raises whatever it likes
        reason = clean(error, 200)
        raise UsageError(f"{str(path)!r} is no memory snapshot: {reason}; give a file of _dump_snapshot()") from None
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise UsageError(f"{str(path)!r} is no memory snapshot: it has no segments; give a file of _dump_snapshot()")
    return value


def by_line(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of living blocks by the user's line that allocated them, the largest first."""
    sizes = Counter[str]()
    for block in _blocks(snapshot):
        if str(block.get("state", "")).startswith("active"):
            sizes[_line(block)] += _int(block.get("size"))
    return dict(sizes.most_common(_MAX_LINES))


def report(snapshot: Mapping[str, Any]) -> list[str]:
    """Return what a snapshot shows, in lines."""
    segments = [s for s in snapshot["segments"] if isinstance(s, dict)]
    reserved = sum(_int(s.get("total_size")) for s in segments)
    blocks = list(_blocks(snapshot))
    active = sum(_int(b.get("size")) for b in blocks if str(b.get("state", "")).startswith("active"))
    holes = [
        _int(block.get("size"))
        for segment in segments
        if _int(segment.get("allocated_size")) > 0
        for block in _dicts(segment.get("blocks"))
        if block.get("state") == "inactive"
    ]
    lines = [
        f"reserved {size_text(reserved)} in {len(segments)} segments, in use {size_text(active)}",
        f"free between living blocks: {size_text(sum(holes))} in {len(holes)} pieces"
        + (f", the largest {size_text(max(holes))}" if holes else ""),
    ]
    failed = [e for trace in _lists(snapshot.get("device_traces")) for e in _dicts(trace) if e.get("action") == "oom"]
    if failed:
        wanted, free = _int(failed[-1].get("size")), _int(failed[-1].get("device_free"))
        lines.append(f"an allocation of {size_text(wanted)} failed with {size_text(free)} free on the device")
        lines.append(f"  asked for at {_line(failed[-1])}")
    lines += ["", *_cause(reserved, holes, failed)]
    sizes = by_line(snapshot)
    if set(sizes) - {_UNKNOWN}:
        lines += ["", "in use, by the line that allocated it:"]
        lines += [f"  {size_text(size):>10}  {clean(line, 160)}" for line, size in sizes.items()]
    elif blocks:
        lines += ["", "the snapshot has no stacks: record with `--memory-history light` or `full`"]
    return lines


_UNKNOWN = "unknown"


def _cause(reserved: int, holes: Sequence[int], failed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    wanted = _int(failed[-1].get("size")) if failed else 0
    if wanted and sum(holes) >= wanted > max(holes, default=0):
        yield "fragmentation: enough is free for what was asked for, but in no single piece (MEM404)"
    elif reserved and sum(holes) > _FRAGMENTED * reserved:
        yield "much of what is reserved lies in pieces between living blocks: fragmentation (MEM404)"
    else:
        yield "not fragmented: what is reserved is in use, or whole segments are free"
        return
    yield "  try `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` in the environment of every rank"


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


def _lists(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
