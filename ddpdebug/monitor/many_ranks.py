"""The steps of very many ranks: what all of them know of a step, and the rows of all where a rule needs those.

All ranks hear the same of each step (`exchange/partial.py`); one of them judges, the first. It asks for the rows of all
ranks where these begin to differ, in the first steps, and once a minute: rules about sums and counts over ranks see
those steps only.
"""

from __future__ import annotations

import base64
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
#: Where ranks differ in another way than before, again and again: so often at once, and then once in so many seconds.
_BURST, _REFILL_SECONDS = 4, 10.0
#: Rows that a rank keeps for those who ask.
_KEPT_ROWS = 256
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


def chosen_step(key: Key, part: StepPart) -> Step:
    """Return the step of the rows that are kept."""
    rows = {rank: decode(data) for rank, data in part.rows().items()}
    known = [(kind, members, data) for kind, (members, data) in part.classes.items()]
    kinds = {decode(data).rank: frozenset(ranks_of(members)) for kind, members, data in known if kind != REST}
    others = frozenset(ranks_of(part.classes[REST][0])) if REST in part.classes else frozenset[int]()
    return Step(step=key[1], optimizer=key[0], world=len(rows), rows=rows, chosen=True, kinds=kinds, others=others)


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
    """

    def __init__(self, world: int, ask: Callable[[Key], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._world, self._ask, self._clock = world, ask, clock
        self._parked: deque[_Parked] = deque()
        self._kinds: dict[tuple[int, bool], frozenset[int]] = {}
        self._last = clock()
        self._credit, self._since = float(_BURST), clock()

    def add(self, key: Key, part: StepPart, step: Step) -> None:
        """Take the next step."""
        parked = _Parked(key, step, part.ranks)
        self._parked.append(parked)
        if self._wants(key, part):
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

    def _wants(self, key: Key, part: StepPart) -> bool:
        now = self._clock()
        kinds = frozenset(members for members, _ in part.classes.values())
        place = key[0], key[2]
        known = self._kinds.get(place)
        self._kinds[place] = kinds
        if (key[0] == 0 and key[1] in _FIRST_STEPS) or now - self._last >= WHOLE_SECONDS:
            self._last = now
            return True
        if len(kinds) < 2 or kinds == known:
            return False
        if key[2] or part.any(_GRAVE):
            return True
        self._credit = min(float(_BURST), self._credit + (now - self._since) / _REFILL_SECONDS)
        self._since = now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


@dataclass(slots=True)
class Rows:
    """The newest rows of one rank, for the rank that judges."""

    kept: OrderedDict[Key, bytes] = field(default_factory=OrderedDict)

    def add(self, data: bytes) -> bytes:
        """Keep a row, and return it."""
        self.kept[key_of(decode(data))] = data
        while len(self.kept) > _KEPT_ROWS:
            self.kept.popitem(last=False)
        return data

    def own(self, key: Key) -> dict[int, Row]:
        """Return its row of a step by its rank; empty where that is not kept."""
        row = decode(self.kept[key]) if key in self.kept else None
        return {} if row is None else {row.rank: row}

    def answer(self, keys: Iterable[Key]) -> list[str]:
        """Return the rows of some steps, as text, of those that are kept."""
        return [base64.b64encode(self.kept[key]).decode() for key in keys if key in self.kept]


class ManyRanks:
    """What a rank of very many keeps.

    Args:
        ask: asks all ranks for their rows of a step.
    """

    def __init__(self, world: int, ask: Callable[[Key], object]) -> None:
        self.parts, self.whole, self.rows = PartAssembler(), WholeSteps(world, ask), Rows()
        self.unheard: list[Sequence[tuple[Finding, bool]]] = []  # what was found and said, until this rank hears it
