"""The judge of hangs: which ranks wait for which, and whether that is a hang. Torch-free, no clock, no file.

Evidence decides. What a rank is waited for while anything moves in it is at work, however long it takes; a clock alone
never accuses one. `judge` is given what is known of every rank at one moment, and is asked again and again:

- ranks have issued *different* collectives at the same place of a group's order, or wait in a *circle*: nobody can move
  any more;
- a rank that is waited for has *left*;
- it gives *no sign* of life, and the kernel shows why; one that runs meanwhile may be done yet;
- it is *stuck*: nothing has moved in it for long;
- it is *busy*: no verdict, but worth a line for whoever asks what all wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ddpdebug.progress.frames import KINDS
from ddpdebug.schema.announcements import Hang
from ddpdebug.schema.ended import Kind
from ddpdebug.schema.progress import Call, RankProgress

#: Seconds in one place from which on a rank counts as waiting.
WAIT_SECONDS = 1.0
#: Seconds for which everybody must have stood still where nobody can move any more.
CLOSED_SECONDS = 2.0
#: Seconds of standing still in the same call, as far as is known: their data may be on the way for long.
SAME_CALL_SECONDS = 60.0
#: How much longer is waited for what ranks have called that have not said it yet.
ANSWER_SECONDS = 2.0
#: Seconds after which one that is waited for, and has left, will not come again.
LEFT_SECONDS = 1.0
#: Seconds without a sign of life.
SILENT_SECONDS = 5.0
#: The same where the kernel shows that it runs, for it may hold the interpreter's lock in C and be done soon: the
#: collector of garbage, pickling. And the seconds of processor time that it must have had since it was found silent:
#: on a busy machine such things take long.
RUNNING_SECONDS, RAN_SECONDS = 15.0, 10.0
#: Until then it is said as a warning only: pickling, pandas and json take that long.
RUNNING_SURE_SECONDS = 60.0
#: The same of one whose innermost frame matches a regular expression, which is then accused: one attempt in a text of
#: 100 MB takes 0.05 to 2.6 s, and one that tries all ways to match does not end.
MATCHING_SECONDS, MATCHED_SECONDS = 8.0, 2.0
#: Seconds in which nothing has moved.
STUCK_SECONDS = 8.0
#: Seconds for which all others must have stood where they are by then: one that looks for what another rank does, such
#: as a file that it writes, has time to see it.
ARRIVED_SECONDS = 3.0
#: How grave each kind is: a graver one says more than what was said before.
GRAVITY: Mapping[str, int] = {"busy": 0, "stuck": 1, "silent": 2, "cycle": 3, "mismatch": 4, "left": 5}
#: Of a collective that does not end though all are in it: anything else that is found says more.
_SAME_CALL_GRAVITY = -1
#: Reasons of an end that nothing is wrong with: who has come to it has made all its calls.
IN_ORDER = frozenset({Kind.FINISHED, Kind.STOPPED})
#: Functions of torch's that send from rank to rank.
_MESSAGES = frozenset({"batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"})
_MOST_FRAMES = 12


def gravity(hang: Hang) -> int:
    """Return the rank of a verdict in the order of gravity."""
    return _SAME_CALL_GRAVITY if hang.kind == "cycle" and hang.difference == "unknown" else GRAVITY[hang.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The state of a rank as known now.

    Args:
        progress: its last look at itself, None where it never gave one.
        silent: seconds since its last sign of life, as long as that is too long; 0 for one that answers.
        runs: of one that is silent, the kernel shows that it works, or wants to.
        ran: seconds of processor time that it has had since it was found silent.
        unknown: nobody can ask the kernel about it.
        kernel: what else the kernel shows of it, in words.
        now: its place is that of this moment, though it is silent: it was read from outside.
        left: why it has left, empty while it is there; `left_at` the user's line that it left from, where it told.
        left_for: seconds since then; `left_by_others` where it ended because another rank had gone.
        entered: how many collectives of each group it had entered by then, where it told.
    """

    progress: RankProgress | None = None
    silent: float = 0.0
    runs: bool = False
    ran: float = 0.0
    unknown: bool = False
    kernel: str = ""
    now: bool = False
    left: str = ""
    left_at: str | None = None
    left_for: float = 0.0
    left_by_others: bool = False
    entered: Mapping[str, int] | None = None

    @property
    def waits(self) -> tuple[Call, ...]:
        """The calls that the rank waits in; empty if it cannot answer."""
        known = self.progress
        if known is None or self.silent or self.left or known.same < WAIT_SECONDS:
            return ()
        return known.waits

    @property
    def is_in_order(self) -> bool:
        """Whether the rank has left because its script had finished."""
        return self.left.removeprefix("it has ended: ") in IN_ORDER

    def count(self, group: str) -> int | None:
        """Return the number of collectives of a group that the rank has entered; None if unknown.

        Of one that has left in order the last look may be old: only what it said of its end counts.
        """
        known = self.progress
        if self.is_in_order:
            last = self.entered if known is None or not known.ended else {**known.entered, **(self.entered or {})}
            return (last or {}).get(group)
        return None if known is None else known.entered.get(group)


def judge(seen: Mapping[int, Seen]) -> Hang | None:
    """Return the verdict on the ranks' waiting; None if no rank waits, or it is too early to decide.

    Of ranks that are `busy` it is told at once: how long that is too long, the caller decides by `waited`.
    """
    waiting = {rank: one.waits for rank, one in sorted(seen.items()) if one.waits}
    if not waiting:
        return None
    seen = _AllSeen(seen)
    missing = {rank: _missing(rank, calls, seen) for rank, calls in waiting.items()}
    if not any(missing.values()):  # then of one that has gone it need not be known how far it had come
        missing = {rank: _missing(rank, calls, seen, sure=False) for rank, calls in waiting.items()}
    culprits = sorted({rank for ranks in missing.values() for rank in ranks} - waiting.keys())
    left = [rank for rank in culprits if seen[rank].left]
    if left:
        # one that was thrown out of its call is named only where nobody has gone that may have thrown it out
        gone = [rank for rank, one in sorted(seen.items()) if one.left and not one.left_by_others]
        first = [rank for rank in left if rank in gone] or gone or left
        late = [rank for rank in first if seen[rank].left_for >= LEFT_SECONDS]
        return _about("left", late, waiting, seen) if late else None
    if (found := _mismatch(waiting, seen)) is not None:
        return found
    if not culprits:
        return _closed(waiting, seen)
    return _of_missing(culprits, waiting, seen)


def _of_missing(culprits: list[int], waiting: Mapping[int, tuple[Call, ...]], seen: Mapping[int, Seen]) -> Hang | None:
    """Return what ranks come to that are there, that are waited for, and that do not wait themselves."""
    silent = [rank for rank in culprits if seen[rank].silent]
    if silent:
        late = [rank for rank in silent if _is_silent_too_long(seen[rank])]
        sure = [rank for rank in late if not seen[rank].runs or _is_sure(seen[rank])]
        if late and not sure:
            return replace(_about("silent", late, waiting, seen), kind="stuck", runs=True)
        return _about("silent", sure, waiting, seen) if sure else None
    known = {rank: progress for rank in culprits if (progress := seen[rank].progress) is not None}
    if len(known) < len(culprits):
        return None
    busy = [rank for rank, progress in known.items() if progress.still < STUCK_SECONDS]
    members = _members((call for calls in waiting.values() for call in calls), seen)
    arrived = [one.progress.same for rank in members - known.keys() if (one := seen[rank]).progress is not None]
    is_stuck = not busy and min(arrived, default=0.0) >= ARRIVED_SECONDS
    return _about("stuck" if is_stuck else "busy", busy or culprits, waiting, seen)


def _is_silent_too_long(one: Seen) -> bool:
    if one.unknown:
        return one.silent >= RUNNING_SECONDS
    if one.runs:
        return _is_sure(one) or (one.silent >= RUNNING_SECONDS and one.ran >= RAN_SECONDS)
    return one.silent >= SILENT_SECONDS


def _is_sure(one: Seen) -> bool:
    """Whether one that is silent and runs will not be done soon."""
    if _is_matching(one) and one.silent >= MATCHING_SECONDS and one.ran >= MATCHED_SECONDS:
        return True
    return one.silent >= RUNNING_SURE_SECONDS and one.ran >= RAN_SECONDS


def _is_matching(one: Seen) -> bool:
    """Whether one that is silent matches a regular expression now."""
    return one.now and one.progress is not None and one.progress.kind == "regex"


def _missing(rank: int, calls: tuple[Call, ...], seen: Mapping[int, Seen], *, sure: bool = True) -> set[int]:
    """Return the ranks without which what a rank waits in cannot end; `sure` only those of which that is known."""
    return {peer for call in calls for peer in _missed(rank, call, seen, sure=sure)}


def _missed(rank: int, call: Call, seen: Mapping[int, Seen], *, sure: bool = True) -> set[int]:
    """Return the ranks without which a call cannot end; nobody where it is a message of which nobody knows from whom.

    Who waits for such a one may do so by design: a server of parameters, for work.
    """
    if _is_message(call):
        peer = None if call.root is None else seen.get(call.root)
        return set() if call.root is None or peer is None or _answers(rank, call, peer) else {call.root}
    known = seen.absent if isinstance(seen, _AllSeen) else {}
    # ranks of one group have them from one text
    key = call.group, call.number, call.operation, id(call.ranks), sure
    if key not in known:
        members = call.ranks or tuple(seen)
        known[key] = {peer for peer in members if peer in seen and not _is_in(call, seen[peer], sure=sure)}
    return known[key] - {rank}


class _AllSeen(dict[int, Seen]):
    """What is known of all ranks, and who is not in a call: a thousand ranks wait in the same one."""

    def __init__(self, seen: Mapping[int, Seen]) -> None:
        super().__init__(seen)
        self.absent: dict[tuple[object, ...], set[int]] = {}


def _members(calls: Iterable[Call], seen: Mapping[int, Seen]) -> set[int]:
    """Return the ranks that take part in some call; all where it does not say who."""
    groups = {id(call.ranks): call.ranks for call in calls}
    return set[int]().union(*(ranks or seen for ranks in groups.values()))


def _is_message(call: Call) -> bool:
    return call.point_to_point or (not call.number and call.operation in _MESSAGES)


def _answers(rank: int, call: Call, other: Seen) -> bool:
    """Return whether a rank is in the other half of another one's message, or need not be, as far as is known."""
    if other.is_in_order:  # its message may be on the way
        return True
    known = other.progress
    return known is not None and any(
        _is_message(own) and own.operation != call.operation and own.root in {None, rank} for own in known.waits
    )


def _is_in(call: Call, other: Seen, *, sure: bool = True) -> bool:
    """Return whether a rank has come to a collective: it may have gone on since.

    One that has left in order has come to all that it is not known to have missed: who gives its part to a root need
    not wait for the others. Of one that has left otherwise it is no more than possible, which is enough against `sure`.
    """
    known = other.progress
    count = other.count(call.group) if call.number else None
    if count is not None:
        return count >= call.number
    if other.left:
        return other.is_in_order or sure
    return known is not None and not call.number and any(own.operation == call.operation for own in known.waits)


# --- nobody can move --------------------------------------------------------------------------------------------------


def _mismatch(waiting: Mapping[int, tuple[Call, ...]], seen: Mapping[int, Seen]) -> Hang | None:
    """Return the first place in the order of a group where ranks that wait have called something else."""
    by_place: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    still: dict[int, float] = {}
    for rank, calls in waiting.items():
        progress = seen[rank].progress
        assert progress is not None
        still[rank] = progress.same  # who waits may spin, as a synchronisation with a device does
        for call in (*progress.recent, *calls):
            if not call.point_to_point and call.number:
                by_place[call.group, call.number][rank] = call
    groups = {call.group for calls in waiting.values() for call in calls}
    for (group, _), made in sorted(by_place.items(), key=lambda item: item[0][1]):
        if all(call.is_done for call in made.values()):
            continue  # it has kept nobody
        sides = _sides(made) if group in groups else []
        if len(sides) > 1:
            return _of_sides("mismatch", sides, made, waiting, seen) if _is_settled(sides, made, still, seen) else None
    return None


def _is_settled(
    sides: list[list[int]], made: Mapping[int, Call], still: Mapping[int, float], seen: Mapping[int, Seen]
) -> bool:
    """Return whether calls that differ will stay so, and all that can be asked have said what they have called."""
    firm = [max(still[rank] for rank in side) for side in sides]
    if sorted(firm)[-2] < CLOSED_SECONDS:
        return False
    members = _members((call for call in made.values() if call.ranks), seen) & seen.keys()
    asked = {rank for rank in members if not (seen[rank].left or seen[rank].silent)}
    return asked <= made.keys() or max(firm) >= CLOSED_SECONDS + ANSWER_SECONDS


def _sides(calls: Mapping[int, Call]) -> list[list[int]]:
    """Return the ranks whose calls agree, the largest side first."""
    sides: list[list[int]] = []
    for rank, call in sorted(calls.items()):
        own = next((side for side in sides if calls[side[0]].differs(call) is None), None)
        if own is None:
            sides.append([rank])
        else:
            own.append(rank)
    return sorted(sides, key=lambda side: (-len(side), side))


def _of_sides(
    kind: str,
    sides: list[list[int]],
    calls: Mapping[int, Call],
    waiting: Mapping[int, tuple[Call, ...]],
    seen: Mapping[int, Seen],
) -> Hang:
    first = calls[sides[0][0]]
    outvoted = len(sides[0]) > len(sides[1])
    ranks = sorted(rank for side in sides[1:] for rank in side) if outvoted else sorted(calls)
    found = _about(kind, ranks, waiting, seen)
    return replace(
        found,
        difference=next(why for side in sides[1:] if (why := first.differs(calls[side[0]])) is not None),
        sides={_numbers(side): calls[side[0]].words() for side in sides},
        undecided=() if outvoted else tuple([tuple(side) for side in sides]),
        location=calls[ranks[0]].location or found.location,
        group=first.group,
    )


def mismatch(calls: Mapping[int, Call], seen: Mapping[int, Seen]) -> Hang:
    """Return the verdict on calls with the same number that do not match, ended ranks included."""
    return _of_sides("mismatch", _sides(calls), calls, {rank: (call,) for rank, call in calls.items()}, seen)


def _closed(waiting: Mapping[int, tuple[Call, ...]], seen: Mapping[int, Seen]) -> Hang | None:
    """Return what ranks come to that all wait for each other, or that are all in a call that does not end."""
    stills = {rank: one.progress.still for rank in waiting if (one := seen[rank]).progress is not None}
    involved = _in_circle(waiting, seen)
    if not involved:
        return _in_same_call(waiting, stills, seen)
    if min(stills[rank] for rank in involved) < CLOSED_SECONDS:
        return None
    # ranks in the same order of calls, as far as seen
    sides: dict[tuple[str, bool, str], list[int]] = defaultdict(list)
    told: dict[tuple[str, str], list[int]] = defaultdict(list)
    groups = {call.group: call.ranks for rank in involved if (call := waiting[rank][0]).ranks}
    for rank in sorted(involved):
        call = waiting[rank][0]
        sides[call.group, call.point_to_point, call.operation if not call.group else ""].append(rank)
        told[call.group, call.words(_among(call, groups))].append(rank)
    most = max(sides.values(), key=len)
    outvoted = len(involved) > len(most) > len(involved) / 2
    ranks = sorted(involved.difference(most)) if outvoted else sorted(involved)
    found = _about("cycle", ranks, waiting, seen)
    return replace(
        found,
        difference="order",
        sides={_numbers(members): words for (_, words), members in told.items()},
        undecided=(*map(tuple, told.values()),) if len(told) > 1 and not outvoted else (),
    )


def _among(call: Call, groups: Mapping[str, tuple[int, ...]]) -> str:
    """Say who takes part in a call, where groups differ, with torch's name of the group where its ranks do not."""
    if len(groups) < 2 or not call.ranks:
        return ""
    alike = [*groups.values()].count(call.ranks) > 1
    return f"ranks {_numbers(call.ranks)}{f' (group {call.group})' * alike}"


def _in_circle(waiting: Mapping[int, tuple[Call, ...]], seen: Mapping[int, Seen]) -> set[int]:
    """Return the ranks none of whose calls can end, because each misses one of these ranks.

    A call that misses nobody is in flight: its rank goes on, and whoever waits for that one.
    """
    stand = set(waiting)

    def keeps(rank: int, call: Call) -> bool:
        if _is_message(call) and call.root is None:  # whoever it is, it stands
            others = {peer for peer in call.ranks or seen if peer != rank}
            return bool(others) and all(peer in stand and not _answers(rank, call, seen[peer]) for peer in others)
        return bool(stand & _missed(rank, call, seen))

    while moves := {rank for rank in stand if not all(keeps(rank, call) for call in waiting[rank])}:
        stand -= moves
    return stand


def _in_same_call(
    waiting: Mapping[int, tuple[Call, ...]], stills: Mapping[int, float], seen: Mapping[int, Seen]
) -> Hang | None:
    """Return that a collective has not ended for long though all are in it, who stand still."""
    calls = {
        rank: own[0]
        for rank, own in waiting.items()
        if not (_missing(rank, own, seen, sure=False) or any(map(_is_message, own)))
    }
    everyone = _members((call for call in calls.values() if call.ranks), seen)
    if not calls or not everyone <= waiting.keys() or min(stills.values()) < SAME_CALL_SECONDS:
        return None
    return replace(
        _about("cycle", sorted(calls), waiting, seen),
        sides={_numbers(side): calls[side[0]].words() for side in _sides(calls)},
        difference="unknown",
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def _about(kind: str, ranks: list[int], waiting: Mapping[int, tuple[Call, ...]], seen: Mapping[int, Seen]) -> Hang:
    first = seen[ranks[0]]
    progress = first.progress
    others = {rank: calls for rank, calls in waiting.items() if rank not in ranks} or waiting
    waits: dict[str, list[int]] = {}
    for rank, calls in waiting.items():
        waits.setdefault(calls[0].words(), []).append(rank)
    group = next(iter(others.values()))[0].group
    counts = {str(rank): count for rank, one in seen.items() if (count := one.count(group)) is not None}
    return Hang(
        kind=kind,  # type: ignore[arg-type]  # one of them
        step=min((one.progress.step for rank in others if (one := seen[rank]).progress is not None), default=None),
        ranks=tuple(ranks),
        phase=_phase(kind, progress),
        location=place_of(first),
        group=group or None,
        waits={_numbers(members): text for text, members in waits.items()},
        where={str(rank): where(seen[rank]) for rank in ranks},
        calls=counts if len(set(counts.values())) > 1 else {},
        stacks=_stacks(seen),
        blocked_in=None if progress is None or kind == "silent" else progress.kind or None,
        waited=round(max((one.progress.same for rank in waiting if (one := seen[rank]).progress), default=0.0), 1),
    )


def place_of(one: Seen) -> str | None:
    """Return the user's line at which a rank is, or was last."""
    return one.left_at or (None if one.progress is None else one.progress.place)


def _phase(kind: str, progress: RankProgress | None) -> str | None:
    if kind == "silent":
        return "interpreter"
    return None if progress is None else progress.phase or None


def where(one: Seen) -> str:
    """Return a rank's activity and place in words."""
    known, parts = one.progress, []
    if one.left:
        parts.append(one.left)
    if one.silent:
        parts.append(f"no sign of life for {one.silent:.0f} s")
    if one.silent and not one.kernel:
        parts.append("it runs on another host, and why it is silent is not known")
    if one.kernel:
        parts.append(f"the kernel shows it {one.kernel}" + (f", {KINDS['regex']}" if _is_matching(one) else ""))
    if one.left_at is not None:
        parts.append(f"at {one.left_at}")
    elif known is not None:
        if not (one.left or one.silent):
            does = KINDS.get(known.kind, "runs" if known.still < STUCK_SECONDS else "does not move")
            parts.append(does if not known.workers else f"{does} ({known.workers})")
        if known.place is not None:
            last = "last seen " if one.left or (one.silent and not one.now) else ""
            function = f" ({known.function})" if known.function else ""
            parts.append(f"{last}at {known.place}{function}" + (f": {known.does}" if known.does else ""))
        if known.phase and known.phase not in {"script", "collective"}:
            parts.append(f"in {known.phase}")
    return ", ".join(parts) or "nothing is known of it"


def _stacks(seen: Mapping[int, Seen]) -> dict[str, tuple[str, ...]]:
    """Return the frames of all ranks, those of ranks in the same place once."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, one in sorted(seen.items()):
        if one.progress is not None and one.progress.stack:
            alike.setdefault(one.progress.stack[:_MOST_FRAMES], []).append(rank)
    return {_numbers(ranks): stack for stack, ranks in alike.items()}


def _numbers(ranks: Collection[int]) -> str:
    """Return ranks as a text that is short for many: "0-3,7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
