"""The point at which the ranks' calls diverge: comparison of their notes. Torch-free, no clock, no file.

A group's calls are compared by their numbers. What must agree (operation, shape, dtype, root) shows *that* they have
parted, and often late: one call more pairs up with the next one of the same kind, and so on, until two meet that do not
fit. So the first difference is looked for before that one: as far back as the lines, steps or batches differ as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpdebug.schema.progress import Noted

#: Calls that torch makes others from, under the same number: the outer one says more.
_OUTER = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "reduce_scatter_tensor",
        "scatter_object_list",
    }
)

_Table = dict[int, Noted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The point at which the ranks' calls diverge.

    Args:
        first: rank -> the first call in which they differ, by whatever.
        clash: rank -> the first calls that do not fit together; empty where all did.
        difference: in what these do not: see `Call.differs`.
    """

    first: Mapping[int, Noted]
    clash: Mapping[int, Noted]
    difference: str | None = None


def parted(notes: Mapping[int, Iterable[Noted]]) -> Apart | None:
    """Return the point at which the ranks' notes diverge; None if they do not, as far as known."""
    tables = {rank: _by_group(own) for rank, own in sorted(notes.items())}
    groups = sorted({group for table in tables.values() for group in table})
    found = [known for group in groups if (known := _in_group(tables, group)) is not None]
    return next((known for known in found if known.clash), found[0] if found else None)


def _in_group(tables: Mapping[int, Mapping[str, _Table]], group: str) -> Apart | None:
    members = {rank: table[group] for rank, table in tables.items() if group in table}
    if len(members) < 2:
        return None
    numbers = sorted(set.intersection(*(set(table) for table in members.values())))
    clash = next((place for place, number in enumerate(numbers) if _clashes(_at(members, number))), None)
    last = len(numbers) if clash is None else clash
    first = last
    while first > 0 and _differ(_at(members, numbers[first - 1]), by_line=clash is not None):
        first -= 1
    if first == len(numbers):
        return None
    calls = {} if clash is None else _at(members, numbers[clash])
    return Apart(first=_at(members, numbers[first]), clash=calls, difference=_clashes(calls))


def _at(members: Mapping[int, _Table], number: int) -> dict[int, Noted]:
    return {rank: table[number] for rank, table in members.items()}


def _clashes(calls: Mapping[int, Noted]) -> str | None:
    """Return in what calls do not fit together."""
    one, *others = (noted.call for noted in calls.values()) if calls else (None,)
    return next((why for other in others if one is not None and (why := one.differs(other)) is not None), None)


def _differ(calls: Mapping[int, Noted], *, by_line: bool) -> bool:
    """Whether ranks have come to a call from another line, or at another step or batch.

    Another line alone is no sign that they have parted: both branches of an `if` may make the same call.
    """
    return len({(n.step, n.batches, n.call.location if by_line else None) for n in calls.values()}) > 1


def _by_group(notes: Iterable[Noted]) -> dict[str, _Table]:
    """Return the numbered calls of each group. Of two with a number the later was issued, or is made by the first."""
    found: dict[str, _Table] = {}
    for noted in notes:
        call = noted.call
        if not call.number:
            continue
        table = found.setdefault(call.group, {})
        before = table.get(call.number)
        if before is None or before.call.operation not in _OUTER or before.call.location != call.location:
            table[call.number] = noted
    return found


def data_ended(notes: Sequence[Noted], operation: str) -> Noted | None:
    """Return the note of an exhausted loader, if no collective came after it."""
    for noted in reversed(notes):
        if noted.call.operation == operation:
            return noted
        if noted.call.number:
            return None
    return None
