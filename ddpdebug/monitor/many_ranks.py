"""The steps of very many ranks: a summary of each step, and the rows of all ranks if a rule needs them.

All ranks hear the same of each step (`exchange/partial.py`); one of them judges, the first. It asks for the rows of all
ranks where these begin to differ, where a rule asks for them, in the first steps, and once a minute: rules that compare
each rank with each other see those steps only.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpdebug.clock import time
from ddpdebug.exchange.partial import REST, Key, StepPart, key_of, ranks_of, set_of
from ddpdebug.exchange.step_assembler import LAG_STEPS, LATE_STEPS, fault_of
from ddpdebug.exchange.ticks import Tick
from ddpdebug.exchange.tree import Tree
from ddpdebug.exchange.tree_ticks import TreeExchange
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
#: Steps that are judged even where there is hardly time for it.
_TELLING = Flag(_GRAVE) | Flag.CHECKED | Flag.SKIPPED | Flag.LAST_STATE
#: Processor time that the judge may take at once, and what it may owe for what must not wait, seconds.
_AT_ONCE, _DEBT = 1.0, 1.0
_LEAST_SHARE = 0.001


class Allowance:
    """The processor time that judging may use: a share of the run's time, with some in advance.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = 1.0
        self._clock, self._since, self._left = clock, clock(), _AT_ONCE

    def has(self, *, telling: bool = False) -> bool:
        """Whether time is left; for a step with strong signs (`telling`) also on credit."""
        now = self._clock()
        self._left = min(_AT_ONCE, self._left + (now - self._since) * max(self.share, _LEAST_SHARE))
        self._since = now
        return self._left > (-_DEBT if telling else 0.0)

    def spend(self, seconds: float) -> None:
        """Subtract used time."""
        self._left -= seconds


def fault_of_part(key: Key, part: StepPart, world: int, progress: int) -> str | None:
    """Return why the rows of a step are impossible; None if they are plausible.

    Args:
        progress: steps that the fastest rank has taken.
    """
    ranks = part.ranks
    if ranks >> world:
        return f"it is of rank {ranks.bit_length() - 1}, and there are {world}"
    kept = [(members, data) for members, data in part.classes.values()]
    for members, data in [*kept, *((ranks, first[2]) for first in part.first if first is not None)]:
        row = decode(data)
        if not (0 <= row.rank < world and members >> row.rank & 1):
            return f"it says that it is of rank {row.rank}"
        if key_of(row) != key:
            return f"it says that it is of step {row.step}"
        if (fault := fault_of(row, row.rank, progress)) is not None:
            return fault
    return None


class PartAssembler:
    """Merges the parts of a step from several ticks, until all members have taken it."""

    def __init__(self) -> None:
        self._open: dict[Key, StepPart] = {}
        self._newest: dict[int, int] = {}
        self._closed: dict[tuple[int, bool], int] = {}
        self._came: dict[int, int] = {}  # step -> who has taken it, by any optimizer; the newest ones

    def add(self, key: Key, part: StepPart) -> None:
        """Add a part; one that arrives after its step was judged is dropped."""
        optimizer, step, last = key
        self._came[step] = self._came.get(step, 0) | part.ranks
        if len(self._came) > 2 * LATE_STEPS:
            self._came = dict(sorted(self._came.items())[-LATE_STEPS:])
        if step <= self._closed.get((optimizer, last), -1):
            return
        if key in self._open:
            self._open[key].merge(part)
        else:
            self._open[key] = part
        self._newest[optimizer] = max(self._newest.get(optimizer, 0), step)

    def ready(
        self, members: int, *, everything: bool = False, last_states: bool = False
    ) -> Iterator[tuple[Key, StepPart]]:
        """Yield the steps that all members have taken, and overdue ones, in ascending order.

        Args:
            members: as a set of ranks.
            everything: what is there is all that comes.
            last_states: of what the last steps have left it is.
        """
        passed = 0  # who has taken a later step than the one that is looked at
        later = dict[int, int]()
        if any(members & ~part.ranks for part in self._open.values()):
            for step, came in sorted(self._came.items(), reverse=True):
                later[step] = passed
                passed |= came
        for key in sorted(self._open, key=lambda key: (key[2], key[1], key[0])):
            absent = members & ~self._open[key].ranks
            overdue = absent and self._is_overdue(key, absent & ~later.get(key[1], passed))
            if not absent or everything or (last_states and key[2]) or overdue:
                part = self._open.pop(key)
                self._closed[key[0], key[2]] = max(key[1], self._closed.get((key[0], key[2]), -1))
                yield key, part

    def _is_overdue(self, key: Key, behind: int) -> bool:
        """Whether to judge a step without ranks that have all passed it, or are far behind."""
        ahead = self._newest[key[0]] - key[1]
        return ahead >= LATE_STEPS or (ahead >= LAG_STEPS and not behind)


def chosen_step(key: Key, part: StepPart, world: int | None = None) -> Step:
    """Return the step made of the kept rows, for a job of `world` ranks; by default of those that have taken it."""
    rows = {rank: decode(data) for rank, data in part.rows().items()}
    known = [(kind, members, data) for kind, (members, data) in part.classes.items()]
    kinds = {decode(data).rank: set_of(members) for kind, members, data in known if kind != REST}
    others = set_of(part.classes[REST][0]) if REST in part.classes else frozenset[int]()
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
        """Whether they may be asked for now; a cause that has been quiet for long begins anew."""
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
    """The steps in judging order, with the rows of all ranks if they are wanted.

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
        self.allowance = Allowance(clock)
        self._parked: deque[_Parked] = deque()
        self._kinds: dict[tuple[int, bool], frozenset[tuple[int, int]]] = {}
        self._last = clock()
        self._whole: dict[int, float] = {}  # optimizer -> when the rows of all were wanted last
        self._credits: OrderedDict[Hashable, _Credit] = OrderedDict()

    def add(self, key: Key, part: StepPart, step: Step) -> None:
        """Add the next step."""
        parked = _Parked(key, step, part.ranks)
        self._parked.append(parked)
        if self.wants(key, part, step):
            parked.rows = {}
            self._ask(key)

    def hear(self, rank: int, data: str) -> None:
        """Add the row of a rank, in the form of `Rows.answer`."""
        try:
            row = decode(base64.b64decode(data, validate=True))
        except (struct.error, ValueError) as error:
            raise ValueError(f"rank {rank} sends what is no row") from error
        for parked in self._parked:
            if parked.key == key_of(row) and parked.rows is not None and row.rank == rank:
                parked.rows[rank] = row

    def ready(self, *, everything: bool = False) -> Iterator[Step]:
        """Yield the steps that can be judged, in order; called in each tick."""
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
        """Whether a step waits for rows."""
        return bool(self._parked)

    def wants(self, key: Key, part: StepPart, step: Step) -> bool:
        """Whether the rows of all ranks are wanted for a step; to be called once for each step."""
        now = self._clock()
        kinds = frozenset((members, decode(data).flags & _GRAVE) for members, data in part.classes.values())
        place = key[0], key[2]
        causes = set[Hashable]() if kinds == self._kinds.get(place) else _causes(part)
        wants = False
        self._whole.setdefault(key[0], self._last if self._whole else now)  # the time counts also where none is left
        if self.allowance.has(telling=bool(causes and (key[2] or part.some & _GRAVE))):
            wants = self._is_due(key[0], key[1], now) or bool(key[2] and causes)  # what the run has left comes once
            for cause in () if wants else causes or self._curious(step):
                wants |= self._may(cause, now)
        if wants or len(kinds) == 1:
            self._kinds[place] = kinds
        return wants

    def _is_due(self, optimizer: int, number: int, now: float) -> bool:
        """Whether the rows of all are wanted whatever the ranks show."""
        since = self._whole[optimizer]
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
    """The newest rows of this rank, kept for the judging rank."""

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
        """Return this rank's row of a step, by rank; empty if it is not kept."""
        data = self.kept.get(key[0], _NONE).get(key)
        row = None if data is None else decode(data)
        return {} if row is None else {row.rank: row}

    def answer(self, keys: Iterable[Key]) -> list[str]:
        """Return the kept rows of some steps as texts."""
        found = [self.kept.get(key[0], _NONE).get(key) for key in keys]
        return [base64.b64encode(data).decode() for data in found if data is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The functions that handle the steps and messages of very many ranks.

    Args:
        say: sends (kind, fields) to all ranks.
        learn: takes each step.
        judge: takes the steps that this rank judges.
        show: takes those that another one judges, and those that nobody has the time for.
        curious: as of `WholeSteps`.
        tell: takes what goes wrong, once for each part.
    """

    say: Callable[..., object]
    learn: Callable[[Step], object]
    judge: Callable[[Step], object]
    show: Callable[[Step], object]
    curious: Callable[[Step], Collection[str]]
    tell: Callable[[str, str], object]


class ManyRanks:
    """The state of one rank among very many, and its handling of steps and messages. Background thread only.

    Args:
        clock: seconds.
        used: seconds of processor time of this thread.
    """

    #: What so many ranks talk over.
    exchange, tree = TreeExchange, Tree

    def __init__(
        self,
        rank: int,
        world: int,
        calls: Calls,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self.rank, self.world, self.judges = rank, world, rank == 0
        self.parts, self.rows = PartAssembler(), Rows()
        self.whole = WholeSteps(world, self._want, clock, calls.curious)
        # what the judge sees all hear: who foresees its question does not idle for a second before it hears that
        self._foreseen = WholeSteps(world, lambda _: None, clock)
        self.allowance = Allowance(clock)
        self.left_out = 0  # steps that were not judged
        self._calls, self._used = calls, used
        self._members: tuple[int, ...] = ()
        self._everyone = 0
        self._doubted = self._is_expecting = False

    def limit(self, share: float) -> None:
        """Limit judging to a share of the run's time; fetching the rows of all ranks may take half as much again."""
        self.allowance.share, self.whole.allowance.share = share, share / 2

    @property
    def busy(self) -> bool:
        """Whether the judging rank waits for rows, or will probably ask this rank for its own at once."""
        return self.whole.waiting if self.judges else self._is_expecting

    def take(self, tick: Tick) -> None:
        """Add the rows of all ranks in a tick."""
        if tick.members is not self._members:
            self._members, self._everyone = tick.members, sum(1 << rank for rank in tick.members)
        for key, part in tick.parts.items():
            fault = fault_of_part(key, part, self.world, tick.progress)
            if fault is None:
                self.parts.add(key, part)
            elif not self._doubted:
                self._doubted = True
                if self.judges:  # all ranks see it
                    self._calls.tell("rows of a step", f"{fault}; they are left out, and so are others like them")

    def work(self, *, last_states: bool) -> None:
        """Process the complete steps; the judging rank may first wait for the rows of all ranks.

        Args:
            last_states: no more of these come.
        """
        self._is_expecting = False
        for key, part in self.parts.ready(self._everyone, last_states=last_states):
            step = chosen_step(key, part, self.world)
            if not step.any(Flag.LAST_STATE):
                self._calls.learn(step)
            if self.judges:
                self.whole.add(key, part, step)
                continue
            self._is_expecting |= self._foreseen.wants(key, part, step)
            if not step.any(Flag.LAST_STATE):  # its own metrics are of its own row
                rows = dict(sorted({**step.rows, **self.rows.own(key)}.items()))
                self._calls.show(replace(step, rows=rows))
        for step in self.whole.ready():
            self._judge(step)

    def _judge(self, step: Step) -> None:
        """Judge a step where there is time for it, and of chosen rows those that tell much also where there is not."""
        telling = step.parted or step.any(_TELLING)
        if step.chosen and not self.allowance.has(telling=telling):
            self.left_out += 1
            if self.left_out == 1:
                text = f"the steps of {self.world} ranks come faster than the budget lets one rank judge them"
                self._calls.tell("judging", f"{text}: from step {step.step} on some are left out")
            self._calls.show(step)  # it was taken, and is counted
            return
        begun = self._used()
        self._calls.judge(step)
        (self.allowance if step.chosen else self.whole.allowance).spend(self._used() - begun)

    def rest(self, *, complete: bool) -> None:
        """Judge the remaining steps, as no more rows come.

        Args:
            complete: leave out steps that some ranks were not heard of.
        """
        for key, part in self.parts.ready(0, everything=True):
            if not (complete and self._everyone & ~part.ranks):
                self.whole.add(key, part, chosen_step(key, part, self.world))
        for step in self.whole.ready(everything=True) if self.judges else ():
            self._calls.judge(step)

    def hear(self, ranks: Sequence[int], kind: str, message: Mapping[str, Any]) -> None:
        """Handle one of `judging.MESSAGES`, which several ranks may have sent in the same words."""
        if kind == "rows":
            optimizer, step, last = message["key"]
            for data in self.rows.answer([(int(optimizer), int(step), bool(last))]):
                self._calls.say("row", row=data)
        else:
            begun = self._used()
            for rank in ranks:
                self.whole.hear(rank, str(message["row"]))
            self.whole.allowance.spend(self._used() - begun)

    def _want(self, key: Key) -> None:
        self._calls.say("rows", key=list(key))
