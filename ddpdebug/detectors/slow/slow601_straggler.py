"""SLOW601: one rank is persistently slower."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.slow.timing import PaceRule, Timing, Window, duration, job, main_phase, per_step
from ddpdebug.schema.pace import PHASES
from ddpdebug.schema.robust import MEDIAN_ERROR, middle, spread

#: Pauses that are remembered.
_KEPT = 16


@dataclass(frozen=True, slots=True)
class _Pause:
    """How late the last rank was."""

    step: int
    number: int  # of the iteration
    place: int
    behind: float
    cost: float
    gc: float
    elapsed: float  # all iterations so far


@dataclass(slots=True)
class _Series:
    """What is remembered of the iterations."""

    window: Window
    hits: deque[frozenset[int]]  # the places that were behind in the newest windows
    recent: deque[float]  # seconds of the newest iterations
    newest: deque[_Pause]  # who was last in each of the newest iterations
    rhythms: deque[tuple[int, int, int] | None]  # of the newest looks: place, every so many iterations, from which on
    since: dict[int, int] = field(default_factory=dict)  # place in `hits` -> the step since which it is behind
    spent: dict[tuple[int, ...], float] = field(default_factory=dict)  # ranks that are slow -> seconds since they are
    pauses: deque[_Pause] = field(default_factory=lambda: deque(maxlen=_KEPT))
    elapsed: float = 0.0
    steps: int = 0
    open: dict[Hashable, Finding] = field(default_factory=dict)  # incident key -> what is still so
    clear: int = 0  # windows in a row in which nobody was behind
    pausing: int = 0  # the iteration until which pauses have not ended


class Straggler(PaceRule):
    """The named rank needs more time for itself than the median of the other ranks, in most steps of several windows.

    What counts is the time in which a rank does not wait for others. `share` is what a step would be shorter with the
    median of the others' time in the place of this rank's, and `cost_seconds` the sum of that since it is slow. Phase
    `work` says that the rank is given more elements and is not slow for those (information: it may be meant so);
    `pauses` that few steps take much longer, at regular distances or in the garbage collector (information as well).

    Impact: the others wait for it in every all-reduce, so the whole job runs at its speed.

    Diagnosis: take the rank and the phase from the finding: a wall-clock timing of `backward()` is equal on all ranks,
    because the fast ones wait inside it. `processor_seconds` beside `behind_seconds` tells computing from waiting: a
    rank that computes no more than the others sleeps, waits for storage, or shares its processors. Then compare on that
    node: clocks, temperature and throttling (`nvidia-smi -q -d PERFORMANCE`), CPU load and affinity, link speed.

    Causes:
    - `data`: slower storage, or fewer CPU cores for its loader
    - `other`, `pauses`: work for this rank only (rank 0): logging, checkpoint, progress bar, `.item()` in every step
    - `pauses`, `gc seconds`: garbage collection: many objects that live long, collected on each rank at another step
    - `forward`, `backward`, `optimizer`: work of the script's own on this rank only: a hook, a request, a file, states
      kept elsewhere
    - `mixed`: a slow device or host: thermal or power throttling, a shared CPU, wrong NUMA binding, a degraded link
    - more work in its batches: longer sequences, more boxes, more tokens

    Remedy:
    - `data`: copy the data to a local disk, or give this rank's loader more workers or cores
    - `other`, `pauses`: move this rank's extra work to a thread or make it rare
    - `pauses`, `gc seconds`: for garbage collection: `gc.freeze()` after setting up, and `gc.collect()` on all ranks at
      the same step
    - `forward`, `backward`, `optimizer`: compare the stacks of this rank with another's (`ddpdebug stacks RUN_DIR`)
    - `mixed`: swap the node: if the slowness stays with it, it is the hardware; if it moves with the rank, it is the
      data; pin processes and check `OMP_NUM_THREADS` (torchrun sets it to 1 when it is unset)
    - balance the work: bucket by length, or fill batches to a number of tokens instead of samples
    """

    code = "SLOW601"
    severity = Severity.WARNING
    title = "one rank is persistently slower"
    of_several = True
    incident = ("ranks",)
    pace_warm_up, pace_block = PaceRule.pace_warm_up, PaceRule.pace_block
    pace_window = Threshold(
        64,
        "newest blocks that are judged together, each time that a quarter is new",
        source="measured: docs/slowness.md",
    )
    straggler_share = Threshold(
        0.1,
        "share of the step that a rank is behind, in the median of a window",
        source="TraceML warns at 10 % as well",
    )
    straggler_seconds = Threshold(
        0.007, "seconds of a block that a rank is behind where no device computes",
        source="measured: beside busy loops healthy ranks of two were 4 to 6 ms apart; a time slice is 3 to 10 ms",
    )  # fmt: skip
    straggler_errors = Threshold(
        4,
        "standard errors of that median that a rank must be behind",
        source="measured on busy machines: docs/slowness.md",
    )
    straggler_last = Threshold(
        0.5,
        "share of a window in which it has to be the last one",
        source="chance gives a quarter to one of four ranks",
    )
    straggler_last_of_two = Threshold(0.7, "the same with two ranks", source="chance gives a half to each")
    straggler_windows = Threshold(
        3, "windows of the newest `straggler_of` that must show it", source="measured: docs/slowness.md"
    )
    straggler_of = Threshold(4, "windows that are looked at together", source="as `straggler_windows`")
    straggler_over = Threshold(
        0.05, "share of the step below which it is over, in as many windows", source="half of what begins it"
    )
    straggler_phase = Threshold(
        0.6, "share of a delay that a phase, more elements or the collector needs to be named",
        source="chosen: more than everything else together",
    )  # fmt: skip
    straggler_elements = Threshold(
        1.05, "times the others' elements from which a rank has more work", source="chosen: shards differ by less"
    )
    pause_size = Threshold(
        1.0, "steps behind that make a pause, where it is not in every 3rd to 10th",
        source="measured on busy machines: the scheduler alone rarely takes a whole step",
    )  # fmt: skip
    pause_seconds = Threshold(
        0.05,
        "seconds behind in a step that make a pause",
        source="chosen: a collection of 500,000 objects takes as long",
    )
    pause_count = Threshold(5, "pauses that make a rhythm", source="chosen: four distances can be compared")
    pause_regular = Threshold(
        0.1, "share by which distances of pauses may differ that are alike", source="as for recurring incidents"
    )
    pause_alike = Threshold(
        0.6, "share of the distances that have to be alike", source="chosen: one pause by chance spoils two of them"
    )
    pause_share = Threshold(0.1, "share of all time that pauses have to cost", source="as `straggler_share`")

    fires_on = Examples(
        lambda: job(120, more=lambda step, rank, phase: 0.02 * (rank == 2 and phase == "forward")),
        lambda: job(120, world=2, more=lambda step, rank, phase: 0.02 * (rank == 1 and phase == "backward")),
        lambda: job(120, more=lambda step, rank, phase: 0.03 * (rank == 0 and phase == "other" and step > 40)),
        lambda: job(  # twice the elements
            120,
            more=lambda step, rank, phase: 0.025 * (rank == 3 and phase in {"forward", "backward"}),
            fields=lambda step, rank: {"batch_elements": 1000 + 1000 * (rank == 3)},
        ),
        lambda: job(160, more=lambda step, rank, phase: 0.3 * (rank == 0 and phase == "other" and step % 20 == 0)),
        lambda: job(160, more=lambda step, rank, phase: 0.05 * (rank == 0 and phase == "other" and step % 4 == 0)),
        lambda: job(  # collections, each on another rank
            160,
            more=lambda step, rank, phase: 0.2 * (phase == "forward" and step % 12 == 3 * rank),
            fields=lambda step, rank: {"gc_seconds": 0.2 * (step % 12 == 3 * rank)},
        ),
    )
    silent_on = Examples(
        lambda: job(200, noise=0.3),
        lambda: job(200, more=lambda step, rank, phase: 0.02 * (rank == step % 4 and phase == "data")),
        lambda: job(200, more=lambda step, rank, phase: 0.3 * (rank == 0 and phase == "other" and step % 100 == 0)),
        lambda: job(200, more=lambda step, rank, phase: 0.003 * (rank == 2 and phase == "forward")),
        lambda: job(70, more=lambda step, rank, phase: 0.03 * (rank == 1 and phase == "forward" and step < 30)),
        lambda: job(  # ddpdebug's own
            200,
            more=lambda step, rank, phase: 0.02 * (rank == 0 and phase == "forward"),
            fields=lambda step, rank: {"overhead_seconds": 0.001 + 0.02 * (rank == 0)},
        ),
        lambda: job(  # nobody has measured collectives: this is waiting as well
            200,
            more=lambda step, rank, phase: 0.02 * (rank == 0 and phase == "other"),
            fields=lambda step, rank: {"collective_seconds": math.nan},
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        of, size = int(self.straggler_of), int(self.pace_window)
        self._series = _Series(
            window=Window(size),
            hits=deque(maxlen=of),
            recent=deque(maxlen=size),
            newest=deque(maxlen=size),
            rhythms=deque(maxlen=of),
        )

    def can_show(self, step: Step) -> bool:
        return not self._series.open

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        kind = "slow" if finding.severity is self.severity else finding.phase
        return () if kind == "pauses" and "gc_seconds" in finding.evidence else (kind, finding.ranks)

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return finding.phase == "data"

    def detect(self, step: Step) -> Findings:
        timing = self.iteration(step) if len(step.rows) > 1 else None
        if timing is None:
            return
        series = self._series
        series.steps += 1
        series.elapsed += timing.seconds
        yield from self._pauses(step, series, timing)
        block = self.block(timing)
        if block is not None:
            series.spent = {ranks: spent + _cost_of(block, ranks) for ranks, spent in series.spent.items()}
        if block is not None and (blocks := series.window.add(block)) is not None:
            yield from self._judge(step, series, blocks)

    def finish(self) -> Findings:
        for known in self._series.open.values():
            yield replace(known, evidence={**known.evidence, **self._so_far(self._series, known)})

    @staticmethod
    def _so_far(series: _Series, known: Finding) -> Fields:
        """Return what ranks have cost, as it is now."""
        if known.phase == "pauses" or (cost := series.spent.get(known.ranks)) is None:
            return {}
        text = cost_text(known.ranks, known.evidence["share"], cost)
        return {"cost": text, "cost_seconds": _short(cost), "steps": series.steps}

    # --- in most steps ------------------------------------------------------------------------------------------------

    def _judge(self, step: Step, series: _Series, blocks: Sequence[Timing]) -> Findings:
        behind = self._behind(blocks)
        usual = middle(block.seconds for block in blocks)
        device = any(row.device_limit_bytes for row in step.rows.values())
        least = max(self.straggler_share * usual, 0.0 if device else self.straggler_seconds)
        slow = self._slow(blocks, behind, least)
        series.hits.append(slow)
        late = {place for hit in series.hits for place in hit}
        for place in slow - series.since.keys():
            series.since[place] = _beginning(blocks, place, behind[place][0])
        series.since = {place: since for place, since in series.since.items() if place in late}
        if slow:
            self._spent(series, blocks, sorted(slow))
        series.clear = (
            0 if any(late >= self.straggler_over * usual for late, _ in behind.values()) else series.clear + 1
        )
        if series.clear >= self.straggler_windows:
            series.spent.clear()
            series.open = {key: known for key, known in series.open.items() if known.phase == "pauses"}
        often = [place for place in slow if sum(place in hit for hit in series.hits) >= self.straggler_windows]
        if often:
            yield self._keep(series, self._word(step, series, blocks, sorted(often), behind))

    def _behind(self, blocks: Sequence[Timing]) -> dict[int, tuple[float, float]]:
        """Return place -> (median of what it is behind, standard error), of ranks that were last in some block."""
        found = {}
        for place in sorted({block.last() for block in blocks}):
            late = [block.behind(place) for block in blocks]
            found[place] = middle(late), MEDIAN_ERROR * spread(late) / math.sqrt(len(blocks))
        return found

    def _slow(
        self, blocks: Sequence[Timing], behind: Mapping[int, tuple[float, float]], least: float
    ) -> frozenset[int]:
        """Return the places that are behind, alone or together, and that the others wait for in most blocks."""
        errors = self.straggler_errors
        late = {place for place, (seconds, error) in behind.items() if seconds >= max(least, errors * error)}
        world = len(blocks[0].ranks)
        newest = blocks[-max(1, int(self.pace_window) // 4) :]
        late = {place for place in late if 2 * middle(block.behind(place) for block in newest) >= least}  # still
        if not late or 2 * len(late) > world:
            return frozenset()  # two kinds of ranks, none of them the exception
        often = self.straggler_last_of_two if world == 2 else self.straggler_last
        awaited = 0
        for block in blocks:
            own = block.times["own"]
            awaited += max(own[place] for place in late) == max(own)
        return frozenset(late) if awaited >= often * len(blocks) else frozenset()

    def _word(
        self,
        step: Step,
        series: _Series,
        blocks: Sequence[Timing],
        places: Sequence[int],
        behind: Mapping[int, tuple[float, float]],
    ) -> Finding:
        worst = max(places, key=lambda place: behind[place][0])
        phases = {phase: per_step(blocks, [b.behind_in(phase, worst) for b in blocks]) for phase in PHASES}
        seconds = per_step(blocks, [block.behind(worst) for block in blocks])
        phase, evidence = main_phase(phases, self.straggler_phase), self._evidence(series, blocks, places)
        evidence |= {"behind_seconds": _short(seconds), "phases": {p: _short(s) for p, s in phases.items()}}
        ratio = self._more_work(blocks, worst, seconds)
        if ratio:
            phase = "work"
            evidence["elements"] = {
                str(rank): round(per_step(blocks, [b.times["elements"][i] for b in blocks]))
                for i, rank in enumerate(blocks[0].ranks)
            }
            evidence["more"] = f"rank {blocks[0].ranks[worst]} has {ratio:.1f} times the elements of the others"
        collected = per_step(blocks, [block.behind_in("gc", worst) for block in blocks])
        if collected >= self.straggler_phase * seconds:
            evidence["gc_seconds"] = _short(collected)
        evidence |= self._processor(step, blocks, worst)
        shared = phase == "mixed" and "waits" in evidence  # late everywhere, without computing more
        return self.finding(
            step,
            step=series.since[worst],
            ranks=tuple(blocks[0].ranks[place] for place in places),
            phase=phase,
            severity=Severity.INFO if ratio or shared else self.severity,
            evidence=evidence,
        )

    @staticmethod
    def _spent(series: _Series, blocks: Sequence[Timing], places: Sequence[int]) -> tuple[tuple[int, ...], float]:
        """Return the ranks of these places, and what they have cost since they are slow."""
        ranks = tuple(blocks[0].ranks[place] for place in places)
        if ranks not in series.spent:
            since = min(series.since[place] for place in places)
            series.spent[ranks] = math.fsum(_cost_of(block, ranks) for block in blocks if block.step >= since)
        return ranks, series.spent[ranks]

    def _evidence(self, series: _Series, blocks: Sequence[Timing], places: Sequence[int]) -> dict[str, Any]:
        """Return what the ranks cost: shares of the window, and seconds of the run so far."""
        ranks, cost = self._spent(series, blocks, places)
        late, whole = (
            math.fsum(values) for values in zip(*((_cost_of(b, ranks), b.seconds) for b in blocks), strict=True)
        )
        return {
            "cost": cost_text(ranks, late / whole, cost),
            "share": round(late / whole, 4),
            "cost_seconds": _short(cost),
            "step_seconds": _short(per_step(blocks, [block.seconds for block in blocks])),
            "steps": series.steps,
        }

    def _more_work(self, blocks: Sequence[Timing], place: int, seconds: float) -> float | None:
        """Return how many times the others' elements a rank has, where that explains what it is behind."""
        own = per_step(blocks, [block.times["elements"][place] for block in blocks])
        others = own - per_step(blocks, [block.behind_in("elements", place) for block in blocks])
        if not others > 0 or own < self.straggler_elements * others:
            return None
        base = per_step(blocks, [block.times["own"][place] - block.behind_in("own", place) for block in blocks])
        explained = (own / others - 1) * base
        return own / others if explained >= self.straggler_phase * seconds else None

    def _processor(self, step: Step, blocks: Sequence[Timing], place: int) -> Fields:
        """Return how much processor time a step takes, and what that says where no device computes."""
        own = per_step(blocks, [block.times["cpu"][place] for block in blocks])
        others = own - per_step(blocks, [block.behind_in("cpu", place) for block in blocks])
        if not others > 0 or any(row.device_limit_bytes for row in step.rows.values()):
            return {}
        wall = per_step(blocks, [block.times["own"][place] - block.behind_in("own", place) for block in blocks])
        late = per_step(blocks, [block.behind(place) for block in blocks])
        found: dict[str, Any] = {"processor_seconds": {"rank": _short(own), "others": _short(others)}}
        if own - others < (1 - self.straggler_phase) * late:
            found["waits"] = "it computes hardly more than the others: it sleeps, waits, or shares a processor"
        if others < self.straggler_phase * wall:
            found["machine"] = "all ranks wait for processors: more runs on this machine than it has"
        return found

    # --- in few steps -------------------------------------------------------------------------------------------------

    def _pauses(self, step: Step, series: _Series, timing: Timing) -> Findings:
        last = timing.last()
        if series.pausing and series.steps > series.pausing:
            series.pausing = 0
            series.open = {key: known for key, known in series.open.items() if known.phase != "pauses"}
        behind = timing.behind(last)
        newest = _Pause(
            step=timing.step,
            number=series.steps,
            place=last,
            behind=behind,
            cost=min(timing.cost(), max(0.0, behind)),  # not what ddpdebug takes
            gc=timing.times["gc"][last],
            elapsed=series.elapsed,
        )
        quarter = self.pace_window // 4
        looks, long = series.steps % quarter == 0, newest.behind >= self.pause_seconds
        usual = middle(series.recent) if looks or long else 0.0  # in most steps nobody asks
        series.recent.append(timing.seconds)
        series.newest.append(newest)
        if looks and len(series.newest) == self.pace_window:
            yield from self._often(step, series, timing, usual)
        if len(series.recent) < self.pause_count or not long or newest.behind < self.pause_size * usual:
            return
        series.pauses.append(newest)
        collecting = [pause for pause in series.pauses if pause.gc >= self.straggler_phase * pause.behind]
        own = [pause for pause in series.pauses if pause.place == last]
        for pauses, collected in ((collecting, True), (own, False)):
            if len(pauses) < self.pause_count or pauses[-1] is not newest:
                continue
            if collected or self._regular(pauses):
                yield from self._pause(step, series, timing, pauses, collected=collected)
                return

    def _often(self, step: Step, series: _Series, timing: Timing, usual: float) -> Findings:
        """Look for a rank that is late in every third, fourth, ... iteration, by less than a step."""
        costs: dict[int, float] = {}
        for late in series.newest:
            costs[late.place] = costs.get(late.place, 0.0) + late.cost
        place = max(costs, key=lambda place: costs[place])
        alone = costs[place] >= self.straggler_phase * math.fsum(costs.values())  # else all are in turn
        series.rhythms.append(self._rhythm(series.newest, place, usual) if alone else None)
        rhythm = series.rhythms[-1]
        if rhythm is None or series.rhythms.count(rhythm) < self.straggler_windows:
            return
        _, every, first = rhythm
        pauses = [late for late in series.newest if late.place == place and late.number % every == first]
        yield from self._pause(step, series, timing, pauses, collected=False)

    def _rhythm(self, newest: Sequence[_Pause], place: int, usual: float) -> tuple[int, int, int] | None:
        """Return a place, the shortest distance of iterations in most of which it is late, and the first of them.

        Of a distance of two the median tells.
        """
        seconds = [late.behind if late.place == place else 0.0 for late in newest]
        for every in range(3, int(self.pause_size / self.pause_share) + 1):
            least = max(self.pause_share * every * usual, self.straggler_seconds)
            for begin in range(every):
                own = sorted(seconds[begin::every])
                late = own[int((1 - self.pause_alike) * len(own))]
                rest = middle(value for i, value in enumerate(seconds) if i % every != begin)
                if len(own) >= self.pause_count and late >= max(least, 2 * rest):
                    return place, every, newest[begin].number % every
        return None

    def _regular(self, pauses: Sequence[_Pause]) -> bool:
        gaps = [after.number - before.number for before, after in pairwise(pauses)]
        usual = middle(gaps)
        alike = sum(abs(gap - usual) <= round(self.pause_regular * usual) for gap in gaps)
        return usual > 1 and alike >= self.pause_alike * len(gaps)

    def _pause(
        self, step: Step, series: _Series, timing: Timing, pauses: Sequence[_Pause], *, collected: bool
    ) -> Findings:
        cost = math.fsum(pause.cost for pause in pauses[1:])
        share = cost / (pauses[-1].elapsed - pauses[0].elapsed)
        if share < self.pause_share:
            return
        places = sorted({pause.place for pause in pauses})
        ranks = [timing.ranks[place] for place in places]
        gap = round(middle(after.number - before.number for before, after in pairwise(pauses)))
        so_far = math.fsum(pause.cost for pause in pauses)
        evidence = {
            "cost": cost_text(ranks, share, so_far, of="all time"),
            "share": round(share, 4),
            "cost_seconds": _short(so_far),
            "behind_seconds": _short(cost / max(1, pauses[-1].number - pauses[0].number)),
            "step_seconds": _short(middle(series.recent)),
            "steps": series.steps,
            "every_steps": gap,
            "pause_seconds": _short(middle(pause.behind for pause in pauses)),
        }
        if collected:
            evidence["gc_seconds"] = _short(middle(pause.gc for pause in pauses))
        series.pausing = series.steps + int(self.straggler_windows * max(gap, self.pace_window // 4))
        yield self._keep(
            series,
            self.finding(
                step,
                step=pauses[0].step,
                ranks=tuple(ranks),
                phase="pauses",
                severity=Severity.INFO if share < 2 * self.pause_share else self.severity,
                evidence=evidence,
            ),
        )

    def _keep(self, series: _Series, finding: Finding) -> Finding:
        series.open[self.incident_key(finding)] = finding
        return finding


def _beginning(blocks: Sequence[Timing], place: int, usual: float) -> int:
    """Return the step since which a rank is behind: from there on it is so by the most, and before by the least."""
    best, total, found = 0.0, 0.0, blocks[-1].step
    for block in reversed(blocks):
        total += min(block.behind(place), 2 * usual) - usual / 2  # one late step is not everything
        if total > best:
            best, found = total, block.step
    return found


def _cost_of(block: Timing, ranks: Sequence[int]) -> float:
    """Return the seconds by which a block would have been shorter without these ranks."""
    own = block.times["own"]
    places = {block.ranks.index(rank) for rank in ranks}
    rest = max(seconds for place, seconds in enumerate(own) if place not in places)
    return max(0.0, max(own[place] for place in places) - rest)


def cost_text(ranks: Sequence[int], share: float, seconds: float, *, of: str = "each step") -> str:
    """Return what ranks cost, in words; the finding names them."""
    together = "together " if len(ranks) > 1 else ""
    return f"{together}{100 * share:.0f} % of {of}, {duration(seconds)} so far"


def _short(seconds: float) -> float:
    return round(seconds, 6)
