"""The steps of very many ranks: what all of them know of a step, and the rows of all where a rule needs those.

All ranks hear the same of each step (`exchange/partial.py`); one of them judges, the first. It asks for the rows of all
ranks where these begin to differ, where a rule asks for them, in the first steps, and once a minute: rules that compare
each rank with each other see those steps only.
"""

from __future__ import annotations

import base64
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ddpdebug.exchange.partial import REST, Key, StepPart, key_of, ranks_of
from ddpdebug.exchange.step_assembler import LATE_STEPS
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag, Row, decode
from ddpdebug.schema.step import Step

#: The rows of all ranks are wanted so often where the ranks are alike, seconds.
WHOLE_SECONDS = 60.0
#: The first steps of which they are wanted: most mistakes show early.
_FIRST_STEPS = frozenset({0, 1, 2, 4, 8, 16, 32})
#: ... of each of several optimizers, but no more often than this for all of them.
_APART_SECONDS = 5.0
#: Where ranks differ again and again in the same things: so often at once, and then after so many seconds, each time
#: twice as many; healthy ranks may differ in each step.
_BURST, _REFILL_SECONDS, _MOST_SECONDS = 4, 10.0, 640.0
#: Causes whose credit is kept.
_MOST_CAUSES = 64
#: Rows that a rank keeps for those who ask: of each optimizer, and at least so many where there are many of these.
_KEPT_ROWS, _LEAST_KEPT = 256, 8
#: A step is judged without the rows that have not come after so many ticks.
_TICKS = 100
#: ... or where so many steps wait behind it.
_MOST_PARKED = 192


#: Flags of which the first step counts.
_GRAVE = int(
    Flag.LOSS_NONFINITE
    | Flag.LOCAL_GRADS_NONFINITE
    | Flag.GRADS_NONFINITE
    | Flag.FORWARD_NONFINITE
    | Flag.INPUT_NONFINITE
    | Flag.PARAMS_NONFINITE
    | Flag.STEP_NONFINITE
)


class PartAssembler:
    """Joins what comes of a step in several ticks, until all members have taken it."""

    def __init__(self) -> None:
        self._open: dict[Key, StepPart] = {}
        self._newest: dict[int, int] = {}
        self._closed: dict[tuple[int, bool], int] = {}

    def add(self, key: Key, part: StepPart) -> None:
        """Take what has come; what comes after its step was judged is dropped."""
        optimizer, step, last = key
        if step <= self._closed.get((optimizer, last), -1):
            return
        if key in self._open:
            self._open[key].merge(part)
        else:
            self._open[key] = part
        self._newest[optimizer] = max(self._newest.get(optimizer, 0), step)

    def ready(self, members: int, *, everything: bool = False) -> Iterator[tuple[Key, StepPart]]:
        """Yield the steps that all members have taken, and those that are overdue, in ascending order.

        Args:
            members: as a set of ranks.
            everything: what is there is all that comes.
        """
        for key in sorted(self._open, key=lambda key: (key[2], key[1], key[0])):
            part, ahead = self._open[key], self._newest[key[0]] - key[1]
            whole = not members & ~part.ranks
            if whole or everything or ahead >= LATE_STEPS:
                del self._open[key]
                self._closed[key[0], key[2]] = max(key[1], self._closed.get((key[0], key[2]), -1))
                yield key, part


def chosen_step(key: Key, part: StepPart, world: int | None = None) -> Step:
    """Return the step of the rows that are kept, of a job of so many ranks; by default those that have taken it."""
    rows = {rank: decode(data) for rank, data in part.rows().items()}
    known = [(kind, members, data) for kind, (members, data) in part.classes.items()]
    kinds = {decode(data).rank: frozenset(ranks_of(members)) for kind, members, data in known if kind != REST}
    others = frozenset(ranks_of(part.classes[REST][0])) if REST in part.classes else frozenset[int]()
    return Step(
        step=key[1],
        optimizer=key[0],
        world=part.ranks.bit_count() if world is None else world,
        rows=rows,
        chosen=True,
        kinds=kinds,
        others=others,
        told=part.summary,
    )


@dataclass(slots=True)
class _Credit:
    """How often the rows of all ranks may be asked for, for one cause."""

    left: int = _BURST
    wait: float = _REFILL_SECONDS
    since: float = 0.0

    def take(self, now: float) -> bool:
        """Tell whether they may be asked for now; a cause that has been quiet for long begins anew."""
        if now - self.since > 2 * _MOST_SECONDS:
            self.left, self.wait = _BURST, _REFILL_SECONDS
        if self.left:
            self.left -= 1
        elif now - self.since < self.wait:
            return False
        else:
            self.wait = min(2 * self.wait, _MOST_SECONDS)
        self.since = now
        return True


@dataclass(slots=True, eq=False)
class _Parked:
    key: Key
    step: Step
    members: int
    rows: dict[int, Row] | None = None  # of all ranks, where they are wanted
    ticks: int = 0


class WholeSteps:
    """The steps in the order in which they are judged, with the rows of all ranks where those are wanted.

    Args:
        world: ranks.
        ask: asks all ranks for their rows of a step.
        clock: seconds.
        curious: the rules for which the rows of all ranks are worth asking for, by what chosen ones show.
    """

    def __init__(
        self,
        world: int,
        ask: Callable[[Key], object],
        clock: Callable[[], float] = time.monotonic,
        curious: Callable[[Step], Collection[str]] = lambda _: (),
    ) -> None:
        self._world, self._ask, self._clock, self._curious = world, ask, clock, curious
        self._parked: deque[_Parked] = deque()
        self._kinds: dict[tuple[int, bool], frozenset[tuple[int, int]]] = {}
        self._last = clock()
        self._whole: dict[int, float] = {}  # optimizer -> when the rows of all were wanted last
        self._credits: OrderedDict[Hashable, _Credit] = OrderedDict()

    def add(self, key: Key, part: StepPart, step: Step) -> None:
        """Take the next step."""
        parked = _Parked(key, step, part.ranks)
        self._parked.append(parked)
        if self._wants(key, part, step):
            parked.rows = {}
            self._ask(key)

    def hear(self, rank: int, data: str) -> None:
        """Take the row of a rank, as `Rows.answer` sends it."""
        try:
            row = decode(base64.b64decode(data, validate=True))
        except (struct.error, ValueError) as error:
            raise ValueError(f"rank {rank} sends what is no row") from error
        for parked in self._parked:
            if parked.key == key_of(row) and parked.rows is not None and row.rank == rank:
                parked.rows[rank] = row

    def ready(self, *, everything: bool = False) -> Iterator[Step]:
        """Yield what can be judged, in order; called in each tick."""
        for parked in self._parked:
            parked.ticks += parked.rows is not None
        while self._parked:
            head = self._parked[0]
            late = everything or head.ticks > _TICKS or len(self._parked) > _MOST_PARKED
            if head.rows is not None and not late and len(head.rows) < head.members.bit_count():
                return
            self._parked.popleft()
            rows = head.rows or {}
            if len(rows) == head.members.bit_count():
                optimizer, step, _ = head.key
                yield Step(step=step, optimizer=optimizer, world=self._world, rows=dict(sorted(rows.items())))
            else:
                yield head.step

    @property
    def waiting(self) -> bool:
        """Tell whether rows are waited for."""
        return bool(self._parked)

    def _wants(self, key: Key, part: StepPart, step: Step) -> bool:
        now = self._clock()
        kinds = frozenset((members, decode(data).flags & _GRAVE) for members, data in part.classes.values())
        place = key[0], key[2]
        causes = set[Hashable]() if kinds == self._kinds.get(place) else _causes(part)
        wants = self._is_due(key[0], key[1], now) or bool(key[2] and causes)  # what the run has left comes once
        for cause in () if wants else causes or self._curious(step):
            wants |= self._may(cause, now)
        if wants or len(kinds) == 1:
            self._kinds[place] = kinds
        return wants

    def _is_due(self, optimizer: int, number: int, now: float) -> bool:
        """Tell whether the rows of all are wanted whatever the ranks show."""
        since = self._whole.setdefault(optimizer, self._last if self._whole else now)
        first = number in _FIRST_STEPS and optimizer < _BURST
        if not first and (now - since < WHOLE_SECONDS or now - self._last < _APART_SECONDS):
            return False
        self._whole[optimizer] = self._last = now
        return True

    def _may(self, cause: Hashable, now: float) -> bool:
        credit = self._credits.setdefault(cause, _Credit(since=now))
        self._credits.move_to_end(cause)
        while len(self._credits) > _MOST_CAUSES:
            self._credits.popitem(last=False)
        return credit.take(now)


def _causes(part: StepPart) -> set[Hashable]:
    """Return in what the kinds of ranks of a step differ, field by field, and what is not finite on some rank."""
    first, *others = part.classes
    found: set[Hashable] = {"rest"} if REST in part.classes else set()
    bits = part.some & _GRAVE
    for other in others:
        pairs = enumerate(zip(first, other, strict=other != REST != first))
        places = {place: pair for place, pair in pairs if pair[0] != pair[1]}
        if 0 in places:
            bits |= int(places[0][0]) ^ int(places[0][1])
        found |= places.keys() - {0}
    return found | {("flag", bit) for bit in ranks_of(bits)}


_NONE: OrderedDict[Key, bytes] = OrderedDict()


@dataclass(slots=True)
class Rows:
    """The newest rows of one rank, for the rank that judges."""

    kept: dict[int, OrderedDict[Key, bytes]] = field(default_factory=dict)  # by optimizer

    def add(self, data: bytes) -> bytes:
        """Keep a row, and return it."""
        key = key_of(decode(data))
        ring = self.kept.setdefault(key[0], OrderedDict())
        ring[key] = data
        while len(ring) > max(_LEAST_KEPT, _KEPT_ROWS // len(self.kept)):
            ring.popitem(last=False)
        return data

    def own(self, key: Key) -> dict[int, Row]:
        """Return its row of a step by its rank; empty where that is not kept."""
        data = self.kept.get(key[0], _NONE).get(key)
        row = None if data is None else decode(data)
        return {} if row is None else {row.rank: row}

    def answer(self, keys: Iterable[Key]) -> list[str]:
        """Return the rows of some steps, as text, of those that are kept."""
        found = [self.kept.get(key[0], _NONE).get(key) for key in keys]
        return [base64.b64encode(data).decode() for data in found if data is not None]


class ManyRanks:
    """What a rank of very many keeps.

    Args:
        ask: asks all ranks for their rows of a step.
        curious: as of `WholeSteps`.
    """

    def __init__(
        self, world: int, ask: Callable[[Key], object], curious: Callable[[Step], Collection[str]] = lambda _: ()
    ) -> None:
        self.parts, self.rows = PartAssembler(), Rows()
        self.whole = WholeSteps(world, ask, curious=curious)
        self.unheard: list[Sequence[tuple[Finding, bool]]] = []  # what was found and said, until this rank hears it
