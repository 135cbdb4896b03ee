"""The collectives of this process from torch's flight recorder: the number entered, and the newest ones.

The recorder is on by default for gloo; for NCCL `TORCH_FR_BUFFER_SIZE` has to be set before a group is made. Stack
traces are never asked for: the first call with them takes seconds and stops the other threads. Source: FlightRecorder
of torch 2.13, measured: counts 0.02 to 0.2 ms, entries 0.1 ms for tens of them.

Torch goes through its tables of groups without a lock. The process dies where another thread makes a group at that
moment, or issues the first collective of one. So the recorder is read only of a process whose training stands still,
and ever more seldom where a group has issued nothing yet.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed as dist

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.collective_calls import sequence_number

#: Entries that are read.
_KEPT = 32


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective of a process group in the recorder."""

    group: str
    number: int
    operation: str
    shapes: tuple[str, ...]
    is_done: bool
    point_to_point: bool


class Collectives:
    """Reader of the recorder; remembers the names of groups, whose numbers differ between processes."""

    #: Functions of torch's in which ranks meet in the store.
    meetings = names.MEETINGS
    #: The last counts were those of the groups themselves, among them messages from rank to rank.
    is_counted = False
    #: Messages from rank to rank were among the entries of the script's groups.
    has_messages = False

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # number of a group -> name, "" for one of ours
        #: Number of a group -> its newest collectives: their numbers among all operations, and among collectives.
        self._numbers: dict[int, dict[int, int]] = {}

    def entered(self) -> dict[str, int]:
        """Return how many calls the script's groups have counted themselves, by name; at any time."""
        return {name: count for name, (count, _) in (self._counted() or {}).items()}

    def counts(self, *, exact: bool = False) -> dict[str, tuple[int, int]] | None:
        """Return (entered, completed) by name of the script's groups; None if torch does not report it.

        To be called only while the training stands still.

        Torch counts messages from rank to rank as well, of which ranks may send more or fewer than others. They are
        left out as far as entries tell that were read; `exact` reads them where there is a new collective.
        """
        status = (_dump(entries=False) or {}).get("pg_status") or {}
        self.is_counted = not status
        if not status:
            return self._counted()
        numbers = {int(number): value for number, value in status.items()}
        if not numbers.keys() <= self._names.keys():
            self.newest()
            for number in numbers:  # one whose collectives have left the ring is not asked for again and again
                self._names.setdefault(number, "")
        elif exact and any(
            [
                value["last_enqueued_collective"] > max(self._numbers.get(number) or (0,))
                for number, value in numbers.items()
                if number in self._living()
            ]
        ):
            self.newest()
        found: dict[str, tuple[int, int]] = {}
        for number in sorted(self._living()):
            value = numbers.get(number)
            if value is None:
                continue
            name = self._names[number]
            entered = self._among_collectives(number, value["last_enqueued_collective"])
            completed = self._among_collectives(number, value["last_completed_collective"])
            if entered > 0:
                found[name] = entered, max(completed, 0)
        return found

    def newest(self, most: int = _KEPT) -> list[Issued]:
        """Return the newest collectives of the script's groups, oldest first; empty if torch does not report them."""
        known = _dump(entries=True)
        found = []
        for entry in (known or {}).get("entries") or ():
            name = str(entry["process_group"][0])
            self._names[int(entry["pg_id"])] = name
            if name:
                found.append(entry)
        living = self._living()
        found = [entry for entry in found if int(entry["pg_id"]) in living]
        self.has_messages |= any([bool(entry.get("is_p2p")) for entry in found])
        numbers: dict[int, dict[int, int]] = {}
        for entry in found:
            if not entry.get("is_p2p"):
                numbers.setdefault(int(entry["pg_id"]), {})[int(entry["op_id"])] = int(entry["collective_seq_id"])
        self._numbers |= {group: dict(islice(reversed(known.items()), _KEPT)) for group, known in numbers.items()}
        return [_issued(entry) for entry in found[-most:]]

    def _living(self) -> set[int]:
        """Return the numbers of groups without those that another of the same name has followed."""
        latest = {name: number for number, name in sorted(self._names.items()) if name}
        return set(latest.values())

    def _among_collectives(self, group: int, number: int) -> int:
        """Return the number of an operation among the collectives, as if there had been no message since."""
        known = self._numbers.get(group, {})
        last = max((operation for operation in known if operation <= number), default=0)
        return number - last + known.get(last, 0)

    @staticmethod
    def records() -> bool:
        """Return whether torch keeps a record of collectives in this process."""
        return bool(_dump(entries=True)) and os.environ.get("TORCH_FR_BUFFER_SIZE") != "0"

    @staticmethod
    def _counted() -> dict[str, tuple[int, int]] | None:
        """Return what groups count themselves, without knowing what has completed."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        found: dict[str, tuple[int, int]] = {}
        for group, ranks in _groups().items():
            entered = sequence_number(group) if dist.get_rank() in ranks else None
            if entered is not None:
                found[str(group.group_name)] = (entered, entered)
        return found or None


def members_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of the script's process groups, by group name."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    return {str(group.group_name): tuple(sorted(ranks)) for group, ranks in _groups().items() if ranks}


def _groups() -> Mapping[Any, Any]:
    """Return process group -> its ranks, without what torch notes of groups that this rank is not in."""
    tables: Mapping[Any, Any] = dict(getattr(names.group_world, "pg_group_ranks", None) or {})
    return {group: ranks for group, ranks in tables.items() if not isinstance(group, int)}


def _dump(*, entries: bool) -> dict[str, Any] | None:
    try:
        data = names.dump_flight_recorder(includeCollectives=entries, includeStackTraces=False, onlyActive=False)
        known = pickle.loads(data)  # noqa: S301 - torch has made it in this process, this moment
    except Exception:  # noqa: BLE001 - absent, or another one than we know
        return None
    return known if isinstance(known, dict) else None


def _issued(entry: Mapping[str, Any]) -> Issued:
    types = [str(name).lower() for name in entry.get("input_dtypes") or ()]
    shapes = zip(types, entry.get("input_sizes") or (), strict=False)
    peer_to_peer = bool(entry.get("is_p2p"))
    return Issued(
        group=str(entry["process_group"][0]),
        number=int(entry["p2p_seq_id" if peer_to_peer else "collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2].partition(" ")[0],
        shapes=tuple([f"{_TYPES.get(name, name)} {list(sizes)}" for name, sizes in shapes]),
        is_done=bool(entry.get("retired")),
        point_to_point=peer_to_peer,
    )


#: The recorder's names of types that are not torch's.
_TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}
