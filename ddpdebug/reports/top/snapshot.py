"""The state of a run at a moment, from its run directory. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ddpdebug.clock import time
from ddpdebug.progress.boxes import DEAD, ELSEWHERE, RankState, read_ranks
from ddpdebug.progress.waits import judge
from ddpdebug.run_directory.reader import STEPS, damage, read_findings, read_newest, read_outcomes, read_run
from ddpdebug.run_directory.segments import segment_paths
from ddpdebug.schema import pace
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import UNDECIDED, Finding, Severity
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import step_of
from ddpdebug.sinks.agreement import dissenters
from ddpdebug.sinks.words import culprits_text, number, ranks_text

#: Steps that a value is taken from when the newest did not compute it.
_BACK = 64
_MAX_WAITS = 6
#: The end of a rank that could not report one.
KILLED = "killed"
_NONFINITE = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE


@dataclass(slots=True, kw_only=True)
class RankView:
    """The line of one rank in the view; NaN and empty values are unknown."""

    rank: int
    step: int | None = None
    age: float = math.nan  # seconds since its last step
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)  # of the newest steps of the first optimizer; oldest first
    step_seconds: float = math.nan
    mean_seconds: float = math.nan  # of the steps that `own_seconds` is the mean of
    own_seconds: float = math.nan  # of these, what it did not wait for others
    wait_seconds: float = math.nan  # ... and what it did
    phases: Mapping[str, float] = field(default_factory=dict)  # phase -> its part of `own_seconds`
    cost: float = math.nan  # share of the time of the run's steps that they would have been shorter without it
    last: float = math.nan  # share of the steps in which it was the slowest
    host: float = math.nan
    device: float = math.nan
    outvoted: tuple[str, ...] = ()
    nonfinite: bool = False
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a run at a moment; unknown numbers are NaN."""

    title: str
    world: int
    ranks: list[RankView]
    differing: Mapping[str, int] = field(default_factory=dict)  # what was compared -> ranks outvoted
    overhead: float = math.nan
    incidents: list[tuple[str, str, str]] = field(default_factory=list)  # code, severity, text; newest first
    damage: Sequence[str] = ()  # what cannot be read of the findings
    unchecked: str = ""  # what is not checked, in words
    waiting: str = ""  # whom ranks wait for, in words
    hangs: bool = False  # and nobody expects that to end by itself
    waits: Sequence[str] = ()  # who waits for whom now, and for how long, in words
    blamed: Mapping[int, str] = field(default_factory=dict)  # rank -> code of a finding that names it by its evidence

    @property
    def missing(self) -> int:
        """Return the number of ranks that are not shown or have ended."""
        return max(0, self.world - sum(1 for view in self.ranks if not view.ended))

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Return the slowest rank, and its own time beyond the others' median, as a share of a step."""
        own = {view.rank: view.own_seconds for view in self.ranks if view.own_seconds > 0}
        if len(own) < 2:
            return None
        slowest = max(own, key=lambda rank: own[rank])
        steps = [view.mean_seconds for view in self.ranks if view.mean_seconds > 0]
        return (slowest, pace.behind(own)[slowest] / median(steps)) if steps else None

    @property
    def lasts(self) -> list[RankView]:
        """Return the ranks that were last in a step, the most frequent ones first."""
        return sorted((view for view in self.ranks if view.last > 0), key=lambda view: (-view.last, view.rank))

    @property
    def undecided(self) -> tuple[str, ...]:
        """Return the compared things in which the ranks differ without a majority."""
        voters = sum(view.step is not None for view in self.ranks)
        return tuple(what for what, count in self.differing.items() if count >= voters > 1)


def from_directory(directory: Path) -> Snapshot:
    """Return the state of a run directory; raise ValueError if it is none."""
    run = read_run(directory)
    world = run.get("world")
    world = world if isinstance(world, int) and 0 < world < 1 << 20 else 1
    rows = read_newest(directory, world * _BACK)
    age = time.time() - max((path.stat().st_mtime for path in segment_paths(directory / STEPS)), default=math.nan)
    outcomes = read_outcomes(directory)
    boxes = {} if run.get("outcome") else read_ranks(directory, world)
    gone = {rank: one.ended or KILLED for rank, one in boxes.items() if one.state == DEAD}
    steps: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        steps.setdefault((row.optimizer, row.step), {})[row.rank] = row
    steps = dict(list(steps.items())[-_BACK:])  # of very many ranks a step has few rows
    views = {rank: RankView(rank=rank) for rank in range(world)} if world <= 4096 else {}
    differing: dict[str, int] = {}
    voted: dict[str, frozenset[int]] = {}
    costs: dict[int, list[float]] = {}
    timed: dict[int, list[Row]] = {}
    chosen, paced, first = 0, 0, min(steps, default=(0, 0))[0]
    for (optimizer, reached), found in steps.items():
        step = step_of(optimizer, reached, found, world)
        chosen += step.chosen
        paced += not step.any(Flag.FIRST)
        for what, ranks in dissenters(step).items():
            voted[what], differing[what] = ranks, len(ranks)
        for rank, cost in pace.costs(pace.own_times(step)).items():
            costs.setdefault(rank, []).append(cost)
        for rank, row in found.items():
            _take(views.setdefault(rank, RankView(rank=rank)), row, curve=optimizer == first)
            # of chosen rows most are here because their rank was first in something: as slow as in these it is not
            fair = not step.chosen or rank == min(found)
            if fair and math.isfinite(row.own_seconds) and not row.has(Flag.FIRST):
                timed.setdefault(rank, []).append(row)
    usual = median([row.step_seconds for of_rank in timed.values() for row in of_rank] or [math.nan])
    for rank, view in views.items():
        if own := timed.get(rank):
            view.own_seconds = fmean(row.own_seconds for row in own)
            view.mean_seconds = fmean(row.step_seconds for row in own)
            view.wait_seconds = view.mean_seconds - view.own_seconds
            view.phases = {phase: fmean(row.own_phases[phase] for row in own) for phase in pace.PHASES}
        mean = usual if chosen else view.mean_seconds
        if (known := costs.get(rank)) and mean > 0:
            count = paced if chosen else len(known)  # where its row is not here it was not the last
            view.cost, view.last = sum(known) / count / mean, sum(map(bool, known)) / count
        view.outvoted = tuple(what for what, ranks in voted.items() if rank in ranks)
        view.ended = str(outcomes.get(rank, {}).get("reason") or gone.get(rank, ""))
        view.age = age if view.step is not None else math.nan
    findings = read_findings(directory)[::-1]
    return Snapshot(
        title=f"{run.get('name') or run['run']} · {directory}",
        world=world,
        ranks=[views[rank] for rank in sorted(views)],
        differing=differing,
        overhead=_overhead(rows),
        incidents=[(finding.code, finding.severity.label, _told(finding)) for finding in findings],
        damage=damage(directory),
        unchecked=_unchecked(run.get("coverage")),
        **_waiting(run.get("waiting")),
        waits=_waits(boxes),
        blamed=_blamed(findings, world),
    )


def _blamed(findings: Iterable[Finding], world: int) -> dict[int, str]:
    """Return the ranks that a finding names although a vote of the ranks is a tie, and its code."""
    certain = (
        finding
        for finding in findings
        if finding.severity >= Severity.ERROR and UNDECIDED not in finding.evidence and len(finding.ranks) < world
    )
    return {rank: finding.code for finding in certain for rank in finding.ranks}


def _waiting(known: object) -> dict[str, Any]:
    """Return who is waited for as `run.json` has it."""
    if not isinstance(known, Mapping):
        return {}
    try:
        state = next(each for each in WaitState if each.label == known.get("state"))
        words = f"waiting for {ranks_text(map(int, known['ranks']))}: {state.label}"
    except (StopIteration, KeyError, TypeError, ValueError):
        return {}
    return {"waiting": " · ".join(filter(None, (words, known.get("location")))), "hangs": state.is_hang}


def _waits(boxes: Mapping[int, RankState]) -> list[str]:
    """Return who waits for whom now, by the black boxes of ranks on this host."""
    ranks = {rank: one for rank, one in boxes.items() if one.state != ELSEWHERE}
    calls: dict[str, list[int]] = {}
    longest: dict[str, float] = {}
    for rank, one in ranks.items():
        if one.seen.waits and one.progress is not None:
            words = one.seen.waits[0].words()
            calls.setdefault(words, []).append(rank)
            longest[words] = max(longest.get(words, 0.0), one.progress.same)
    lines = [
        f"{ranks_text(members)} wait{'s' * (len(members) == 1)} in {words}, for {number(longest[words], 2)} s"
        for words, members in calls.items()
    ]
    found = judge({rank: one.seen for rank, one in ranks.items()})
    if found is not None and found.kind not in {"mismatch", "cycle"}:
        lines += [f"for rank {rank}: {words}" for rank, words in found.where.items()]
    elif found is not None:
        lines.append("nobody can move: " + "; ".join(f"rank {who}: {call}" for who, call in found.sides.items()))
    return lines[:_MAX_WAITS]


def _unchecked(record: object) -> str:
    known = Coverage.from_json(record)
    return "" if known is None or known.complete is not False else known.line()


def _take(view: RankView, row: Row, *, curve: bool) -> None:
    view.step = row.step
    view.nonfinite = row.has(_NONFINITE)
    known = {"loss": row.loss, "step_seconds": row.step_seconds}
    for name, value in known.items():
        if not math.isnan(value):
            setattr(view, name, value)
    if curve and math.isfinite(row.loss):
        view.losses.append(row.loss)
    view.host, view.device = row.host_bytes, row.device_reserved_bytes


def _overhead(rows: Iterable[Row]) -> float:
    known = [(row.overhead_seconds, row.step_seconds) for row in rows if row.step_seconds > 0]
    known = [pair for pair in known if math.isfinite(pair[0])]
    return sum(a for a, _ in known) / sum(b for _, b in known) if known else math.nan


def _told(finding: Finding) -> str:
    who = culprits_text(finding) if finding.ranks else ""
    what = finding.subject[0] if finding.subject else finding.title
    since = "" if finding.step is None else f"step {finding.step}"
    return " · ".join(filter(None, (since, who, what)))
