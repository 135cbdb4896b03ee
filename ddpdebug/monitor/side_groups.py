"""The side group of a rank: the job's store, the meeting in it, and the connections to the other ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.exchange.addresses import address_towards, listening_address
from ddpdebug.exchange.meeting import ELSEWHERE, RollCall, Waiting
from ddpdebug.exchange.ticks import Alone, Group
from ddpdebug.isolation.guard import keep_unrecorded

if TYPE_CHECKING:
    from ddpdebug.exchange.tree import Circle, Tree

#: As long as the job's own process groups wait by default: a rank that is stopped for a while is not lost.
_TIMEOUT = datetime.timedelta(minutes=30)
_ENDED = "the process group has ended before all ranks had come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The callbacks of this rank for the meeting with the others.

    Args:
        identity: what all ranks must have in common; what begins with `~` is for rank 0 to decide.
        begins: called before it waits for the others.
        missing: takes the ranks that have not come so far; returns why there is nothing left to wait for, else None.
        met: takes the meeting, once all have come.
        connecting: entered while the connections are made.
        on_silence: takes for how many seconds another rank has not answered.
    """

    identity: Callable[[], Mapping[str, Any]]
    begins: Callable[[], object]
    missing: Callable[[tuple[int, ...]], str | None]
    met: Callable[[RollCall], object]
    connecting: Callable[[], AbstractContextManager[object]]
    on_silence: Callable[[float], None]


class SideGroups:
    """The side groups of one rank, a new one for the remaining ranks each time. `connect` is for the background thread.

    Args:
        number: of this monitor in its process; the ranks' n-th monitors belong together.
    """

    def __init__(self, number: int, meeting: Meeting) -> None:
        self.rank, self.world = 0, 1
        self.tree: type[Tree] | None = None  # of very many ranks
        self.store: Any = None  # a connection of our own to the job's, `torch.distributed.Store`
        self.prefix = f"ddpdebug/{number}"  # of our keys in it
        self._number, self._meeting = number, meeting
        self._group: object | None = None  # the process group of the job whose store we have
        self._roll: RollCall | None = None

    def open_store(self) -> str:
        """Open the store of the job's process group; return the reason if that fails, else an empty text."""
        self._group = internals.default_group_id()
        try:
            self.store = internals.private_store()
        except Exception as error:  # noqa: BLE001 - a store of the user's may do anything
            return str(error) if isinstance(error, ConnectionError) else f"{type(error).__name__}: {error}"
        return ""

    def let_store_go(self) -> None:
        """Drop the store: a file store ends with its last connection, which the interpreter's exit may precede."""
        self.store = self._roll = self._group = None

    def beats_prefix(self) -> str:
        """Return the key prefix of this meeting."""
        return f"{self.prefix}/{'' if self._roll is None else self._roll.token}"

    def way_to_store(self) -> str:
        """Return the address from which this rank reaches the store."""
        return address_towards(internals.store_host(self.store))

    def connect(self, generation: int, members: tuple[int, ...]) -> Group | Tree:
        """Return the group of the remaining ranks.

        Raises:
            ConnectionError: the ranks cannot be compared, and why.
        """
        keep_unrecorded()  # an execution trace of the script's lists what all threads do
        if len(members) == 1:
            self.let_store_go()  # its connection must not outlive the job's process group
            return Alone() if self.tree is None else self.tree(members, self.rank, _connect_none, Alone())
        size, position = len(members), members.index(self.rank)
        known = self._roll if generation else None
        prefix = self._meet() if known is None else known.meet_again(generation, size)
        place = self.store, f"{prefix}/{generation}"
        with self._meeting.connecting():
            if self.tree is not None:
                return self._tree(self.tree, *place, members)
            listening = self._meeting.on_silence, self._address()
            return internals.GlooGroup(*place, position, size, _TIMEOUT, *listening)

    def _meet(self) -> str:
        if self.store is None and not self.take_store(internals.default_group_id()):
            raise ConnectionError(_ENDED)
        meeting, waiting = self._meeting, Waiting()
        meeting.begins()
        give_up = partial(self._why_not_wait, self._group, waiting)
        roll = RollCall(self.store, self._number, self.rank, self.world, meeting.identity(), give_up, waiting)
        prefix = roll.meet()
        self._roll = roll
        meeting.met(roll)
        return prefix

    def _why_not_wait(self, group: object | None, waiting: Waiting) -> str | None:
        reason = self._meeting.missing(waiting.missing)
        if reason is None and group is not None and internals.default_group_id() != group:
            return _ENDED
        return reason

    def take_store(self, group: object | None) -> bool:
        """Open the store of a process group; return whether it is still the job's, which may destroy it at any time.

        Raises:
            ConnectionError: the group has other ranks, or its store gives no second connection.
        """
        if group is None:
            return False
        try:
            place, store = (dist.get_rank(), dist.get_world_size()), internals.private_store()
        except Exception:
            if internals.default_group_id() == group:
                raise
            return False
        if internals.default_group_id() != group:
            return False
        if place != (self.rank, self.world):
            raise ConnectionError(f"the new process group has {place[1]} ranks, not {self.world}")
        self.store, self._group = store, group
        return True

    def _address(self) -> str:
        """Return where this rank listens for those on other hosts."""
        return listening_address(self.way_to_store(), self._setting(ELSEWHERE))

    def _setting(self, name: str) -> str:
        return "" if self._roll is None else str(self._roll.settings.get(name, ""))

    def _tree(self, kind: type[Tree], store: Any, prefix: str, members: tuple[int, ...]) -> Tree:
        address = self._address()

        def connect(circle: Circle) -> internals.GlooGroup:
            name = f"{prefix}/{circle.level}/{circle.members[0]}"
            place = circle.members.index(self.rank), len(circle.members)
            return internals.GlooGroup(store, name, *place, _TIMEOUT, self._meeting.on_silence, address)

        given = self._setting("~neighbours")
        neighbours = int(given) if given.isdecimal() else 0
        return kind(members, self.rank, connect, internals.Words(store, prefix), neighbours)


def _connect_none(circle: Circle) -> internals.GlooGroup:
    raise AssertionError(circle)  # a rank alone is in none
