"""The rows and messages of a part of the ranks in one tick, in bytes that hardly grow with their number. Torch-free.

Where ranks are many nobody needs everybody's row of a healthy step. Of the rows of one step a partial keeps one for
each *class* of ranks (those whose digests and flags are equal), with who is in it, and besides those of the ranks that
are first in something (`EXTREMES`). Of equal messages it keeps one, with who says it. Partials of parts of the ranks
are merged into that of all of them; in which parts they come changes nothing.

Sets of ranks are integers, one bit for each rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ddpdebug.schema.row import ROW_BYTES, Flag, Row, decode
from ddpdebug.schema.step import SUMS, Summary, kind_of

#: Classes of one step that are told apart. Where there are more the ranks have little in common: the others are one.
MAX_CLASSES = 8
#: In what the row of the first rank is kept; NaN is never first.
EXTREMES: tuple[Callable[[Row], float], ...] = (
    lambda row: row.own_seconds,
    lambda row: row.data_seconds,
    lambda row: row.loss,
    lambda row: -row.loss,
    lambda row: row.local_grad_norm,
    lambda row: row.host_private_bytes,
    lambda row: row.device_peak_bytes,
    lambda row: row.device_allocated_bytes,
    lambda row: row.device_reserved_bytes - row.device_peak_bytes,
    lambda row: row.host_peak_bytes,
    lambda row: row.workers_bytes,
    lambda row: row.live_graphs,
    lambda row: row.syncs,
    lambda row: -row.syncs,
    lambda row: row.rank,  # so that there are always two
)

_MASK = struct.Struct("<IH")  # its first byte, and how many follow
_HEAD = struct.Struct("<qqqqqIII")  # progress, least, most, heard, rows that wait, steps, messages, reports
_STEP = struct.Struct("<qq??HH")  # optimizer, step, last, the last class is the rest, classes, first ranks
_SUMMARY = struct.Struct(f"<qq{len(SUMS)}I{len(SUMS)}d")  # flags of some and of all, who knows a sum, sums
_TEXT = struct.Struct("<I")

_FEW = 64
#: The class of ranks that have nothing in common.
REST: tuple[float, ...] = ()
Message = tuple[int, bytes]  # who says it, and what
#: Optimizer, step, and whether it is about what the run's last step has left (`Flag.LAST_STATE`).
Key = tuple[int, int, bool]


def ranks_of(mask: int) -> Iterator[int]:
    """Yield the ranks in a bit mask, ascending."""
    if mask.bit_count() > _FEW:  # each step of the loop below copies all bits
        yield from (rank for rank, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")
        return
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


@lru_cache(maxsize=32)  # most steps and messages are of the same ranks, and of thousands it takes milliseconds
def set_of(mask: int) -> frozenset[int]:
    """Return the ranks in a bit mask as a set."""
    return frozenset(ranks_of(mask))


@dataclass(slots=True)
class StepPart:
    """The kept rows of one step: for each class of equal ranks its members and the row of its lowest rank.

    Args:
        some: flags that some rank has.
        common: flags that every rank has.
        known, sums: for each of `SUMS`, how many ranks know it, and what they add up to.
    """

    classes: dict[tuple[float, ...], tuple[int, bytes]] = field(default_factory=dict)
    first: list[tuple[float, int, bytes] | None] = field(default_factory=lambda: [None] * len(EXTREMES))
    some: int = 0
    common: int = -1
    known: list[int] = field(default_factory=lambda: [0] * len(SUMS))
    sums: list[float] = field(default_factory=lambda: [0.0] * len(SUMS))

    @property
    def summary(self) -> Summary:
        """Return the flags and sums over all ranks."""
        sums = dict(zip(SUMS, zip(self.known, self.sums, strict=True), strict=True))
        return Summary(some=self.some, common=self.common, sums=sums)

    @property
    def ranks(self) -> int:
        """The ranks that have taken the step, as a bit mask."""
        found = 0
        for members, _ in self.classes.values():
            found |= members
        return found

    def add(self, data: bytes, members: int, *, rest: bool = False) -> None:
        """Add the row of a class, or (`rest`) of ranks that belong to no class."""
        row = decode(data)
        self._join(REST if rest else kind_of(row), members, data)
        self.look(data, row)

    def count(self, row: Row) -> None:
        """Add a rank's row to flags and sums."""
        flags = int(row.flags)
        self.some, self.common = self.some | flags, self.common & flags
        for number, read in enumerate(SUMS.values()):
            if math.isfinite(value := read(row)):
                self.known[number] += 1
                self.sums[number] += value

    def look(self, data: bytes, row: Row | None = None) -> None:
        """Keep a row if its rank has an extreme value; the lowest of equal ranks counts."""
        row = decode(data) if row is None else row
        for number, read in enumerate(EXTREMES):
            value, known = read(row), self.first[number]
            if known is None:
                if value == value:  # noqa: PLR0124 - NaN
                    self.first[number] = value, row.rank, data
            elif value > known[0] or (value == known[0] and row.rank < known[1]):
                self.first[number] = value, row.rank, data

    def merge(self, other: StepPart) -> None:
        """Add the rows of other ranks for the same step."""
        for key, (members, data) in other.classes.items():
            self._join(key, members, data)
        for number, (known, found) in enumerate(zip(self.first, other.first, strict=True)):
            if found is None:
                continue
            if known is None or found[0] > known[0] or (found[0] == known[0] and found[1] < known[1]):
                self.first[number] = found
        self.some, self.common = self.some | other.some, self.common & other.common
        self.known = [a + b for a, b in zip(self.known, other.known, strict=True)]
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def _join(self, key: tuple[float, ...], members: int, data: bytes) -> None:
        known = self.classes.get(key)
        if known is None and len(self.classes) >= MAX_CLASSES:
            key = REST
            known = self.classes.get(key)
        if known is None:
            self.classes[key] = members, data
        else:
            lowest = known[1] if known[0] & -known[0] < members & -members else data
            self.classes[key] = known[0] | members, lowest

    def rows(self) -> dict[int, bytes]:
        """Return the kept rows by rank, ascending."""
        found = {decode(data).rank: data for _, data in self.classes.values()}
        found |= {first[1]: first[2] for first in self.first if first is not None}
        return dict(sorted(found.items()))


@dataclass(slots=True)
class Partial:
    """The rows and messages of some ranks in one tick.

    Args:
        leaving, left, busy: who is about to leave, has left with this tick, has unfinished business.
        progress: steps that the fastest of them has taken.
        least, most: steps that the slowest and the fastest of those that go on have taken; -1 where none goes on.
        waiting: rows that wait on the rank with the most.
        heard: reports that the first rank has heard in this tick.
        more: some rank has more to say than went into this tick.
        steps: what is known of each step.
        messages: to all ranks, in the order in which each says them.
        reports: likewise to the one that judges.
    """

    leaving: int = 0
    left: int = 0
    busy: int = 0
    progress: int = 0
    least: int = -1
    most: int = -1
    heard: int = 0
    waiting: int = 0
    more: int = 0
    steps: dict[Key, StepPart] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    reports: list[Message] = field(default_factory=list)

    def add_row(self, data: bytes) -> None:
        """Add a rank's own row."""
        row = decode(data)
        part = self.steps.setdefault(key_of(row), StepPart())
        part.add(data, 1 << row.rank)
        part.count(row)

    def merge(self, other: Partial) -> None:
        """Add the rows and messages of other ranks."""
        self.leaving |= other.leaving
        self.left |= other.left
        self.busy |= other.busy
        self.more |= other.more
        self.progress = max(self.progress, other.progress)
        known = [least for least in (self.least, other.least) if least >= 0]
        self.least = min(known, default=-1)
        self.most = max(self.most, other.most)
        self.heard += other.heard
        self.waiting = max(self.waiting, other.waiting)
        for key, part in other.steps.items():
            if key in self.steps:
                self.steps[key].merge(part)
            else:
                self.steps[key] = part
        self.messages = _joined(self.messages, other.messages)
        self.reports = _joined(self.reports, other.reports)

    def encode(self) -> bytes:
        """Encode the partial as bytes."""
        counts = len(self.steps), len(self.messages), len(self.reports)
        parts = [_HEAD.pack(self.progress, self.least, self.most, self.heard, self.waiting, *counts)]
        parts += [_mask(mask) for mask in (self.leaving, self.left, self.busy, self.more)]
        for (optimizer, step, last), part in self.steps.items():
            first = part.rows()
            for _, data in part.classes.values():
                first.pop(decode(data).rank, None)
            classes = sorted(part.classes.items(), key=lambda item: item[0] == REST)
            about = optimizer, step, last, REST in part.classes, len(classes), len(first)
            parts.append(_STEP.pack(*about))
            parts.append(_SUMMARY.pack(part.some, part.common, *part.known, *part.sums))
            parts += [_mask(members) + data for _, (members, data) in classes]
            parts += first.values()
        for mask, text in (*self.messages, *self.reports):
            parts.append(_mask(mask) + _TEXT.pack(len(text)) + text)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Partial:
        """Decode a partial.

        Raises:
            ValueError: these are not the bytes of a partial.
        """
        reader = _Reader(data)
        progress, least, most, heard, waiting, steps, messages, reports = reader.take(_HEAD)
        found = cls(progress=progress, least=least, most=most, heard=heard, waiting=waiting)
        found.leaving, found.left, found.busy, found.more = (reader.mask() for _ in range(4))
        for _ in range(steps):
            optimizer, step, last, rest, classes, first = reader.take(_STEP)
            part = found.steps[optimizer, step, bool(last)] = StepPart()
            part.some, part.common, *numbers = reader.take(_SUMMARY)
            part.known, part.sums = numbers[: len(SUMS)], list(map(float, numbers[len(SUMS) :]))
            for number in range(classes):
                members = reader.mask()
                part.add(reader.bytes(ROW_BYTES), members, rest=bool(rest) and number == classes - 1)
            for _ in range(first):
                part.look(reader.bytes(ROW_BYTES))
        said = [(reader.mask(), reader.bytes(*reader.take(_TEXT))) for _ in range(messages + reports)]
        found.messages, found.reports = said[:messages], said[messages:]
        if reader.place != len(data):
            raise ValueError(f"{len(data) - reader.place} bytes too many")
        return found


def key_of(row: Row) -> Key:
    """Return the key of a row's step: optimizer, step, whether it is the last state."""
    return row.optimizer, row.step, row.has(Flag.LAST_STATE)


def _joined(some: list[Message], others: Iterable[Message]) -> list[Message]:
    """Return messages with equal ones joined; one that the same rank says twice stays two."""
    found, places = list(some), dict[bytes, list[int]]()
    for place, (_, text) in enumerate(found):
        places.setdefault(text, []).append(place)
    last: dict[int, int] = {}  # who says it -> the newest place: what comes later is heard later
    for mask, text in others:
        after = max((place for who, place in last.items() if who & mask), default=-1)
        free = [place for place in places.setdefault(text, []) if place > after and not found[place][0] & mask]
        if free:
            place = free[0]
            found[place] = found[place][0] | mask, text
        else:
            place = len(found)
            places[text].append(place)
            found.append((mask, text))
        last[mask] = place
    return found


def _mask(mask: int) -> bytes:
    first = 0 if not mask else ((mask & -mask).bit_length() - 1) // 8
    mask >>= 8 * first
    size = (mask.bit_length() + 7) // 8
    return _MASK.pack(first, size) + mask.to_bytes(size, "little")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.place = data, 0

    def bytes(self, size: int) -> bytes:
        found = self._data[self.place : self.place + size]
        if len(found) != size:
            raise ValueError("it ends too early")
        self.place += size
        return found

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.bytes(form.size))

    def mask(self) -> int:
        first, size = self.take(_MASK)
        return int.from_bytes(self.bytes(size), "little") << 8 * first
