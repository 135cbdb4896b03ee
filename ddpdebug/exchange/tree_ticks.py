"""The exchange of many ranks: the same tick loop over a tree, with a summary instead of every rank's row.

A tick tells every rank the same: of each step the classes of ranks that are equal, the rows of those that are first in
something, and messages. Equal messages of several ranks come as one. A *report* goes to the first member alone, which
is the one that judges (`docs/decisions/033-many-ranks.md`).
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from ddpdebug.exchange import ticks
from ddpdebug.exchange.partial import Message, Partial, set_of
from ddpdebug.exchange.ticks import MAX_MESSAGE, MAX_OUTBOX, Exchange, Said, Tick
from ddpdebug.exchange.tree import Tree
from ddpdebug.schema.row import decode

#: What one rank says in a tick at most, and what all do together where each has as much to say; more waits for the
#: next tick. A message that is larger by itself waits for its rank's turn, one tick in as many as it takes.
_CHUNK, _CHUNK_OF_ALL = 1 << 16, 8 << 20
#: So many ranks in a row have their turn together.
_NEIGHBOURS = 64


@lru_cache(maxsize=32)
def _ranks_of(mask: int) -> tuple[int, ...]:
    return tuple(sorted(set_of(mask)))


class TreeExchange(Exchange):
    """An `Exchange` whose `connect` returns a `Tree`."""

    def __init__(self, rank: int, world: int, connect: Callable[..., Any], *calls: Any) -> None:
        super().__init__(rank, world, connect, *calls)
        self._said: deque[tuple[bool, bytes]] = deque()  # (report, message), compressed
        self._said_bytes = 0
        self._chunk = max(1, min(_CHUNK, _CHUNK_OF_ALL // world))

    def _become(self, members: tuple[int, ...], generation: int) -> None:
        super()._become(members, generation)
        self._everyone = sum(1 << rank for rank in members)  # that take part

    def _put(self, data: bytes, *, report: bool) -> bool:
        if self._said_bytes + len(data) >= MAX_OUTBOX:
            return False
        self._said.append((report, data))
        self._said_bytes += len(data)
        return True

    def _has_words(self) -> bool:
        return bool(self._said)

    def _forget_words(self) -> None:
        self._said.clear()
        self._said_bytes = 0

    def _tick(self) -> bool:
        own, tree = self._own(), self._group
        if not isinstance(tree, Tree):
            raise ConnectionError("the side group was closed")
        before = tree.bytes
        result, reports = self._ask(lambda: tree.merge(own))
        self.ticks += 1
        self.gathered_bytes += tree.bytes - before
        self._capacity = min(max(ticks.BATCH_ROWS, result.waiting), ticks.MAX_ROWS)
        self._someone_leaves = bool(result.leaving)
        self._everyone_waits = bool(result.busy or result.more or result.waiting)
        everyone, gone = self._everyone, self._everyone & result.left
        members = tuple([rank for rank in self._members if not gone >> rank & 1]) if gone else self._members
        quiet = not (result.waiting or result.more or result.busy or result.steps or result.messages or result.heard)
        last = quiet and (result.leaving | result.left) == everyone
        apart = self._apart([result.least, result.most] if result.least >= 0 else [])
        told, reported = self._read(result.messages), self._read(reports.reports)
        tick = Tick((), told, members, result.progress, apart, result.steps, reported)
        self._busy = self._hand_over(tick)
        if last or result.left >> self.rank & 1:
            return False
        if result.left:
            self._members, self._generation, self._everyone = members, self._generation + 1, everyone & ~gone
            self._group = None
            self._group = self._connect(self._generation, members)
        return True

    def _own(self) -> Partial:
        me = 1 << self.rank
        with self._wake_lock:
            taken = self._take_rows()
            own = Partial(progress=self.progress, least=self.progress, most=self.progress, waiting=len(self._rows))
            size = 0
            while self._said and not self._holds_back and self._may_say(size, len(self._said[0][1])):
                report, data = self._said.popleft()
                size += len(data)
                (own.reports if report else own.messages).append((me, data))
            self._said_bytes -= size
            own.busy, own.more = me * self._busy, me * bool(self._said)
            if self._closing is not None and not self._holds_back:
                own.leaving, own.least, own.most = me, -1, -1
                if self.impatient and not own.waiting:
                    own.left = me
        for row in taken:
            if (encoded := self._encoded(row)) is None:
                continue
            if (rank := decode(encoded).rank) == self.rank:
                own.add_row(encoded)
            else:
                self._tell("row", f"it says that it is of rank {rank}")
        return own

    def _may_say(self, size: int, more: int) -> bool:
        """Whether another message goes into this tick, after those of `size` bytes."""
        if size:
            return size + more <= self._chunk
        turns = -(-more // self._chunk)  # neighbours have theirs together: what they say alike becomes one
        return (self.ticks + self.rank // _NEIGHBOURS) % turns == 0

    def _read(self, messages: Iterable[Message]) -> tuple[Said, ...]:
        """Return messages with who says them; one that cannot be read is dropped, alike on all ranks."""
        found = []
        for mask, data in messages:
            try:
                message = dict(json.loads(zlib.decompressobj().decompress(data, MAX_MESSAGE)))
            except (zlib.error, ValueError, TypeError, RecursionError) as error:
                if self.rank == self._members[0]:  # all ranks see it
                    first = _ranks_of(mask)[0]
                    self._tell(f"a message of rank {first}", f"{type(error).__name__}: {error}")
                continue
            found.append((_ranks_of(mask), message))
        return tuple(found)
