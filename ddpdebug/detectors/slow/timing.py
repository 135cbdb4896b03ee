"""What the rules about speed read: the ranks' times, step by step and in blocks of steps. Torch-free."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import Detector, Fields, Finding, Step, Threshold
from ddpdebug.schema.pace import PHASES, median_without
from ddpdebug.schema.robust import middle
from ddpdebug.schema.row import Flag

#: Ranks wait for each other in other places than those that are measured, or need not do the same.
_APART = Flag.IN_JOIN | Flag.LOCAL_ONLY | Flag.GUARD_SKIPPED | Flag.LAST_STATE
#: A median over more ranks than these costs time and says no more.
_RANKS = 64
#: An optimizer that has not stepped in so many rows for each optimizer is not waited for.
_RARE = 16


class Work(NamedTuple):
    """What a step of an optimizer does, as the ranks have it in common."""

    optimizer: int
    micro_batches: int
    without_grad: int
    presence: int  # digest of which parameters have a gradient; 0 where that is not known


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step's times, or those of several in a row added up: a number for each rank, in the order of `ranks`.

    Args:
        step: the first.
        count: of iterations of the training loop.
        seconds: from the end of the step before to the end of the last one, of the median rank.
        times: the phases of `Row.own_phases`, and `own`, `wait`, `cpu`, `gc`, `overhead` and `elements`.
        work: of each optimizer step.
    """

    step: int
    count: int
    ranks: tuple[int, ...]
    seconds: float
    times: dict[str, array[float]]
    work: tuple[Work, ...]

    @cached_property
    def _sorted(self) -> dict[str, array[float]]:
        return {}

    def _ordered(self, name: str) -> array[float]:
        if name not in self._sorted:
            self._sorted[name] = array("d", sorted(self.times[name]))
        return self._sorted[name]

    def behind(self, place: int) -> float:
        """How much longer a rank's own time is than the median of the others', without what ddpdebug takes of that."""
        return self.behind_in("own", place) - max(0.0, self.behind_in("overhead", place))

    def behind_in(self, name: str, place: int) -> float:
        """The same for one kind of time."""
        value = self.times[name][place]
        return value - median_without(self._ordered(name), value)

    def last(self) -> int:
        """The place of the rank that took longest."""
        own = self.times["own"]
        return own.index(max(own))

    def cost(self) -> float:
        """What the step would have been shorter with the others' median in the last rank's place (`pace.costs`)."""
        ordered = self._ordered("own")
        return ordered[-1] - ordered[-2]

    def usual(self, name: str) -> float:
        """What the median rank took; of two the faster one, since the other may be slow."""
        values = self.times[name]
        return statistics.median_low(values[:: 1 + len(values) // _RANKS])


_TIMES = (
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "backward_local_seconds",
    "sync_wait_seconds",
    "optimizer_seconds",
)


def timing_of(step: Step) -> Timing | None:
    """Return a step's times; None where they are not known, or ranks may differ."""
    if "timing" not in step.memo:
        step.memo["timing"] = _timing(step)
    found: Timing | None = step.memo["timing"]
    return found


def _timing(step: Step) -> Timing | None:
    columns = step.columns
    whole = columns["step_seconds"]
    if not step.complete or not all(map(math.isfinite, whole)) or step.any(_APART):
        return None
    if any(0 < sum(map(math.isnan, columns[name])) < len(whole) for name in _TIMES):
        return None  # of ranks whose times are not known it cannot be told that they are fast
    phases = [_known(columns[f"{phase}_seconds"]) for phase in ("data", "forward", "backward_local", "optimizer")]
    if sharded := step.any(Flag.SHARDED_STATE):  # shards differ in size, and their owners send them round
        phases[-1] = [0.0] * len(whole)
    syncs, collectives = columns["sync_wait_seconds"], columns["collective_seconds"]
    waits = [a if a >= 0 else b for a, b in zip(syncs, _known(columns["backward_seconds"]), strict=True)]
    sums = [a + b + c + d for a, b, c, d in zip(*phases, strict=True)]
    # where nobody measures collectives the rest of a step may be waiting for others: it is nobody's own then
    if sharded or not all(map(math.isfinite, collectives)):
        rest = [0.0] * len(whole)
    else:
        waits = [a + b for a, b in zip(waits, collectives, strict=True)]
        rest = [max(0.0, a - b - c) for a, b, c in zip(whole, waits, sums, strict=True)]
    own = [a + b for a, b in zip(sums, rest, strict=True)]
    kept: dict[str, Sequence[float]] = {"own": own, "wait": waits, **dict(zip(PHASES, (*phases, rest), strict=True))}
    cpu, gc, overhead = (_known(columns[name]) for name in ("cpu_seconds", "gc_seconds", "overhead_seconds"))
    kept |= {"cpu": cpu, "gc": gc, "overhead": overhead}
    elements = columns["input_elements"]
    kept["elements"] = elements if all(elements) else columns["batch_elements"]
    ranks, seconds = tuple(step.rows), statistics.median_low(whole)
    if step.chosen:
        ranks, kept = _spread(step, kept)
    times = {name: array("d", values) for name, values in kept.items()}
    work = Work(
        step.optimizer,
        statistics.median_low(columns["micro_batches"]),
        statistics.median_low(columns["without_grad"]),
        columns["presence_digest"][0] if step.agrees("presence_digest") else 0,
    )
    return Timing(step=step.step, count=1, ranks=ranks, seconds=seconds, times=times, work=(work,))


def _spread(step: Step, kept: Mapping[str, Sequence[float]]) -> tuple[tuple[int, ...], dict[str, Sequence[float]]]:
    """Return the times of all ranks, with the median of chosen rows for those whose rows are not here.

    Who took longest is among the chosen ones in every step, so of a rank that is always late nothing is missing; one
    that is late now and then is taken for an ordinary one in the other steps.
    """
    everyone, places = tuple(sorted(step.everyone)), {rank: place for place, rank in enumerate(step.rows)}
    found: dict[str, Sequence[float]] = {}
    for name, values in kept.items():
        usual = statistics.median_low(values)
        found[name] = [values[places[rank]] if rank in places else usual for rank in everyone]
    return everyone, found


def _known(seconds: Iterable[float]) -> list[float]:
    return [value if value >= 0 else 0.0 for value in seconds]


def added(timings: Sequence[Timing]) -> Timing:
    """Return the sum of the times of steps in a row."""
    first = timings[0]
    if len(timings) == 1:
        return first
    times = {
        name: array("d", map(math.fsum, zip(*(one.times[name] for one in timings), strict=True)))
        for name in first.times
    }
    return Timing(
        step=first.step,
        count=sum(one.count for one in timings),
        ranks=first.ranks,
        seconds=math.fsum(one.seconds for one in timings),
        times=times,
        work=tuple(work for one in timings for work in one.work),
    )


class Iterations:
    """The iterations of the training loop.

    Args:
        warm_up: first ones, which do not count.
    """

    def __init__(self, warm_up: int) -> None:
        self.number = 0  # of the newest one
        self._warm_up, self._count, self._rows = warm_up, 0, 0
        self._ranks: tuple[int, ...] | None = None
        self._newest: dict[int, tuple[int, float]] = {}  # optimizer -> its newest row, how many after the one before
        self._steps: list[Timing] = []  # of the one in progress

    def add(self, step: Step) -> Timing | None:
        """Add a step; return the times of the iteration that it completes, of one that counts."""
        timing = timing_of(step)
        if timing is None or timing.ranks != (self._ranks or timing.ranks):
            self._steps = []
            return None
        self._ranks = timing.ranks
        self._rows += 1
        self._newest[step.optimizer] = self._rows, self._rows - self._newest.get(step.optimizer, (-math.inf, 0))[0]
        self._steps.append(timing)
        if len(self._newest) > 1 and not self._is_whole():
            return None
        steps, self._steps = self._steps, []
        self._count += 1
        self.number = max(one.step for one in steps)  # of those that step rarely the numbers are smaller
        if self._count <= self._warm_up:
            return None
        return timing if len(steps) == 1 else replace(added(steps), step=self.number, count=1)

    def _is_whole(self) -> bool:
        """Return whether all optimizers that are in use have stepped."""
        patience = _RARE * len(self._newest)  # those that no longer step do not count for it from here on
        self._newest = {o: known for o, known in self._newest.items() if self._rows - known[0] < patience}
        patience = _RARE * len(self._newest)
        rows = self._newest.items()
        awaited = {optimizer for optimizer, (row, gap) in rows if max(self._rows - row, gap) < patience}
        return awaited <= {one.work[0].optimizer for one in self._steps}


class PaceRule(Detector):
    """A rule that reads the ranks' times in windows of blocks of iterations of the training loop.

    An iteration has a step of each optimizer in use: the pace of a generator alone, or of its discriminator, is not
    that of their training.
    """

    keeps_newest = True
    pace_warm_up = Threshold(
        8,
        "first iterations of the training loop, which are not looked at",
        source="chosen: allocations, lazy imports and the first buckets of DDP are over by then",
    )
    pace_block = Threshold(
        0.03,
        "seconds of steps that are added up before they are compared",
        source="chosen: a scheduler's time slice is 3 to 10 ms; steps of GPUs mostly take longer than this",
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._part: list[Timing] = []  # of the block

    @property
    def _iterations(self) -> Iterations:
        if (found := self.shared.get("iterations")) is None:
            found = self.shared["iterations"] = Iterations(int(self.pace_warm_up))
        iterations: Iterations = found
        return iterations

    def iteration(self, step: Step) -> Timing | None:
        """Add a step, once for all rules; return the times of the iteration that it completes, of one that counts."""
        newest, timing = self.shared.get("iteration", (None, None))
        if newest is not step:
            timing = self._iterations.add(step)
            self.shared["iteration"] = step, timing
        found: Timing | None = timing
        return found

    def block(self, timing: Timing) -> Timing | None:
        """Add an iteration; return the block that it completes."""
        self._part.append(timing)
        if math.fsum(one.seconds for one in self._part) < self.pace_block:
            return None
        part, self._part = self._part, []
        return added(part)

    def finding(self, at: Step | None = None, /, **fields: Any) -> Finding:
        """Return a finding as of the newest iteration."""
        return super().finding(at, **{"last_step": self._iterations.number, **fields})


class Window:
    """The newest blocks; to be looked at again each time that a quarter of them is new.

    Half of them are enough for a beginning.
    """

    def __init__(self, size: int) -> None:
        self._blocks: deque[Timing] = deque(maxlen=size)
        self._least, self._every = size // 2, size // 4
        self._fresh = 0

    def add(self, block: Timing) -> list[Timing] | None:
        """Add a block; return all of them where it is time to look."""
        self._blocks.append(block)
        self._fresh += 1
        if len(self._blocks) < self._least or self._fresh < self._every:
            return None
        self._fresh = 0
        return list(self._blocks)


def per_step(blocks: Sequence[Timing], seconds: Iterable[float]) -> float:
    """Return the median over blocks of what each has, for one step."""
    return middle(value / block.count for value, block in zip(seconds, blocks, strict=True))


def main_phase(behind: Fields, share: float) -> str:
    """Return the phase that makes up so much of all of a difference, `mixed` where none does."""
    name = max(PHASES, key=lambda phase: behind[phase])
    return name if behind[name] >= share * math.fsum(behind[phase] for phase in PHASES) else "mixed"


def duration(seconds: float) -> str:
    """Return a duration for people: "40 ms", "3.1 minutes"."""
    for unit, size in (("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.3g} ms"


# --- examples ---------------------------------------------------------------------------------------------------------

#: A healthy rank's step, seconds; waiting for the others is what is left of it.
USUAL = {"data": 0.004, "forward": 0.02, "backward": 0.03, "optimizer": 0.004, "wait": 0.008}


def job(
    count: int,
    *,
    world: int = 4,
    more: Callable[[int, int, str], float] = lambda step, rank, phase: 0.0,
    noise: float = 0.05,
    fields: Callable[[int, int], Fields] = lambda step, rank: {},
) -> tuple[Step, ...]:
    """Return the steps of ranks that wait for each other.

    Args:
        more: (step, rank, phase) -> seconds beyond what is usual.
        noise: as a share, made up and the same in every run.
        fields: (step, rank) -> fields of its row that differ from the rest.
    """
    return tuple(step_at(number, world=world, odd=_rows(number, world, more, noise, fields)) for number in range(count))


def _rows(
    number: int,
    world: int,
    more: Callable[[int, int, str], float],
    noise: float,
    fields: Callable[[int, int], Fields],
) -> dict[int, Fields]:
    times: dict[int, dict[str, float]] = {}
    for rank in range(world):
        rough = 1 + noise * (math.sin(12.9898 * (number * world + rank) + 1.3) * 43758.5453 % 2 - 1)
        times[rank] = {phase: usual * rough + more(number, rank, phase) for phase, usual in USUAL.items()}
        times[rank]["other"] = more(number, rank, "other")
    own = {rank: sum(seconds for phase, seconds in found.items() if phase != "wait") for rank, found in times.items()}
    rows: dict[int, Fields] = {}
    for rank, found in times.items():
        wait = found["wait"] + max(own.values()) - own[rank]
        rows[rank] = {
            "step_seconds": own[rank] + wait,
            "data_seconds": found["data"],
            "forward_seconds": found["forward"],
            "backward_seconds": found["backward"] + wait,
            "backward_local_seconds": found["backward"],
            "sync_wait_seconds": wait,
            "optimizer_seconds": found["optimizer"],
            "collective_seconds": 0.0,
            "cpu_seconds": 0.05,
            "overhead_seconds": 0.001,
            "batch_elements": 1000,
            **fields(number, rank),
        }
    return rows
