"""The tree of groups for many ranks: small groups of neighbours, whose first ranks form small groups in turn.

No rank has a connection to more than `SIZE - 1` others on each level, so that of a thousand ranks each holds a few
dozen sockets at most, and a tick takes a number of steps that grows with the logarithm of their number. Neighbours are
ranks in a row, by default those of one host: launchers number them so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ddpdebug.exchange.partial import Partial

#: Members of a group above the lowest level.
SIZE = 6
#: Ranks of a host that meet in one group; of more than these, groups of so many.
_MOST_NEIGHBOURS, _NEIGHBOURS = 16, 8
#: More than this no rank has to say.
_MOST_BYTES = 1 << 30


class Small(Protocol):
    """A group of a few ranks as the tree uses it; its first member leads it."""

    def collect(self, data: bytes) -> list[bytes] | None:
        """Gather every member's data on the first member, in member order; return None on the others."""

    def spread(self, data: bytes | None) -> bytes:
        """Broadcast the first member's data; return it on every member."""

    def close(self) -> None:
        """Make pending calls fail."""


class Words(Protocol):
    """The messages that leaving ranks write for the others."""

    def leave_word(self, text: str) -> None:
        """Write the reason why this rank leaves, for ranks whose gathers are about to fail."""

    def word(self) -> str | None:
        """Return the reason that a rank has left behind; None if there is none."""


@dataclass(frozen=True, slots=True)
class Circle:
    """One small group: its level, 0 for neighbours, and its members, the first of which leads it."""

    level: int
    members: tuple[int, ...]


def circles(members: Sequence[int], rank: int, neighbours: int = _NEIGHBOURS) -> list[Circle]:
    """Return the groups of a rank, the lowest level first.

    Args:
        members: all ranks, ascending.
        neighbours: ranks of one host.
    """
    if not 2 <= neighbours <= _MOST_NEIGHBOURS:
        neighbours = _NEIGHBOURS
    found, here, size, level = [], list(members), neighbours, 0
    while len(here) > 1:
        blocks = [here[start : start + size] for start in range(0, len(here), size)]
        own = next((block for block in blocks if rank in block), None)
        if own is None:
            break
        if len(own) > 1:
            found.append(Circle(level, tuple(own)))
        here, size, level = [block[0] for block in blocks], SIZE, level + 1
    return found


class Tree:
    """The groups of one rank: collects partials upwards, spreads the merged one downwards.

    Args:
        connect: makes a small group.
        words: the last ones of a rank that goes.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        connect: Callable[[Circle], Small],
        words: Words,
        neighbours: int = _NEIGHBOURS,
    ) -> None:
        self.leave_word, self.word = words.leave_word, words.word
        self._leads_all = rank == members[0]
        self._groups: list[tuple[Small, bool]] = []
        self.bytes = 0  # that have come in
        for circle in circles(members, rank, neighbours):
            self._groups.append((connect(circle), circle.members[0] == rank))

    def merge(self, own: Partial) -> tuple[Partial, Partial]:
        """Return the merged partial of all ranks, and the reports, which only the first rank gets.

        Raises:
            ValueError: what another rank sends cannot be read.
        """
        led: list[Small] = []
        told: Small | None = None
        for group, leads in self._groups:
            given = group.collect(packed(own))
            if not leads or given is None:
                told = group
                break
            for data in given[1:]:
                self.bytes += len(data)
                own.merge(unpacked(data))
            led.append(group)
        reports = Partial()
        if self._leads_all:
            reports.reports, own.reports = own.reports, []
            own.heard = len(reports.reports)
        data = packed(own) if told is None else told.spread(None)
        if told is not None:
            self.bytes += len(data)
        for group in reversed(led):
            group.spread(data)
        return (own if told is None else unpacked(data)), reports

    def close(self) -> None:
        """Make pending calls fail, on all levels."""
        for group, _ in self._groups:
            with suppress(Exception):  # the others have to fail as well
                group.close()


def packed(partial: Partial) -> bytes:
    """Compress a partial for the network: rows of similar ranks share most of their bytes."""
    return zlib.compress(partial.encode(), 1)


def unpacked(data: bytes) -> Partial:
    """Decompress and decode a partial from the network.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        partial = zlib.decompressobj().decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"no partial: {error}") from error
    return Partial.decode(partial)
