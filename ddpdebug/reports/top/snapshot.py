"""The state of a run at a moment, from its run directory or from the endpoints of its ranks. Torch-free."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ddpdebug.clock import time
from ddpdebug.progress.boxes import ELSEWHERE, read_ranks
from ddpdebug.progress.waits import judge
from ddpdebug.run_directory.reader import STEPS, damage, read_findings, read_newest, read_outcomes, read_run
from ddpdebug.run_directory.segments import segment_paths
from ddpdebug.schema import pace
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import UNDECIDED, Finding, Severity
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import step_of
from ddpdebug.sinks.agreement import COMPARED, dissenters
from ddpdebug.sinks.text import culprits_text, number, ranks_text

_TIMEOUT = 3.0
_MAX_BYTES = 32 << 20
_MAX_TARGETS = 1024
#: Steps that a value is taken from when the newest did not compute it.
_BACK = 64
_MAX_WAITS = 6
_NONFINITE = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE


@dataclass(slots=True, kw_only=True)
class RankView:
    """One line of the view; NaN and empty where unknown."""

    rank: int
    step: int | None = None
    age: float = math.nan  # seconds since its last step
    loss: float = math.nan
    norm: float = math.nan
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
    losses: Sequence[float] = ()  # of the newest steps, over the ranks; oldest first

    @property
    def missing(self) -> int:
        """Return how many ranks are not there."""
        return max(0, self.world - sum(1 for view in self.ranks if not view.ended))

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Return the slowest rank, and how much longer it works than the median of the others, as a share of a step."""
        own = {view.rank: view.own_seconds for view in self.ranks if view.own_seconds > 0}
        if len(own) < 2:
            return None
        slowest = max(own, key=lambda rank: own[rank])
        steps = [view.mean_seconds for view in self.ranks if view.mean_seconds > 0]
        return (slowest, pace.behind(own)[slowest] / median(steps)) if steps else None

    @property
    def lasts(self) -> list[RankView]:
        """Return the ranks that were last in a step, those that were it most often first."""
        return sorted((view for view in self.ranks if view.last > 0), key=lambda view: (-view.last, view.rank))

    @property
    def undecided(self) -> tuple[str, ...]:
        """Return what the ranks differ in without anybody being able to tell which are right."""
        voters = sum(view.step is not None for view in self.ranks)
        return tuple(what for what, count in self.differing.items() if count >= voters > 1)


# --- from the run directory -------------------------------------------------------------------------------------------


def from_directory(directory: Path) -> Snapshot:
    """Return the state that a run directory shows; raise ValueError when it is none."""
    run = read_run(directory)
    world = run.get("world")
    world = world if isinstance(world, int) and 0 < world < 1 << 20 else 1
    rows = read_newest(directory, world * _BACK)
    age = time.time() - max((path.stat().st_mtime for path in segment_paths(directory / STEPS)), default=math.nan)
    outcomes = read_outcomes(directory)
    steps: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        steps.setdefault((row.optimizer, row.step), {})[row.rank] = row
    steps = dict(list(steps.items())[-_BACK:])  # of very many ranks a step has few rows
    views = {rank: RankView(rank=rank) for rank in range(world)} if world <= 4096 else {}
    differing: dict[str, int] = {}
    voted: dict[str, frozenset[int]] = {}
    costs: dict[int, list[float]] = {}
    timed: dict[int, list[Row]] = {}
    chosen = paced = 0
    for (optimizer, reached), found in steps.items():
        step = step_of(optimizer, reached, found, world)
        chosen += step.chosen
        paced += not step.any(Flag.FIRST)
        for what, ranks in dissenters(step).items():
            voted[what], differing[what] = ranks, len(ranks)
        for rank, cost in pace.costs(pace.own_times(step)).items():
            costs.setdefault(rank, []).append(cost)
        for rank, row in found.items():
            _take(views.setdefault(rank, RankView(rank=rank)), row)
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
        view.ended = str(outcomes.get(rank, {}).get("reason") or "")
        view.age = age if view.step is not None else math.nan
    findings = read_findings(directory)[::-1]
    return Snapshot(
        title=f"{run['run']} in {directory}",
        world=world,
        ranks=[views[rank] for rank in sorted(views)],
        differing=differing,
        overhead=_overhead(rows),
        incidents=[(finding.code, finding.severity.label, _told(finding)) for finding in findings],
        damage=damage(directory),
        unchecked=_unchecked(run.get("coverage")),
        **_waiting(run.get("waiting")),
        waits=[] if run.get("outcome") else _waits(directory, world),
        blamed=_blamed(findings, world),
        losses=[fmean(known) for found in steps.values() if (known := _losses(found.values()))],
    )


def _losses(rows: Iterable[Row]) -> list[float]:
    return [row.loss for row in rows if math.isfinite(row.loss)]


def _blamed(findings: Iterable[Finding], world: int) -> dict[int, str]:
    """Return the ranks that a finding names although a vote of the ranks is a tie, and its code."""
    certain = (
        finding
        for finding in findings
        if finding.severity >= Severity.ERROR and UNDECIDED not in finding.evidence and len(finding.ranks) < world
    )
    return {rank: finding.code for finding in certain for rank in finding.ranks}


def _waiting(known: object) -> dict[str, Any]:
    """Return who is waited for as `run.json` has it, or as the metrics say."""
    if not isinstance(known, Mapping):
        return {}
    try:
        state = next(each for each in WaitState if each.label == known.get("state"))
        words = f"waiting for {ranks_text(map(int, known['ranks']))}: {state.label}"
    except (StopIteration, KeyError, TypeError, ValueError):
        return {}
    return {"waiting": " · ".join(filter(None, (words, known.get("location")))), "hangs": state.is_hang}


def _waits(directory: Path, world: int) -> list[str]:
    """Say who waits for whom now, by the black boxes of ranks on this host."""
    ranks = {rank: one for rank, one in read_ranks(directory, world).items() if one.state != ELSEWHERE}
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


def _take(view: RankView, row: Row) -> None:
    view.step = row.step
    view.nonfinite = row.has(_NONFINITE)
    known = {"loss": row.loss, "norm": row.grad_norm, "step_seconds": row.step_seconds}
    for name, value in known.items():
        if not math.isnan(value):
            setattr(view, name, value)
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


# --- from the endpoints -----------------------------------------------------------------------------------------------


def from_url(url: str) -> Snapshot:
    """Return the state that the endpoints show, which rank 0's `/sd` lists; raise OSError when none answers."""
    base = url.rstrip("/").removesuffix("/metrics")
    try:
        listed = json.loads(_fetch(f"{base}/sd"))
    except (OSError, ValueError):
        listed = []
    addresses = list(dict.fromkeys([f"{base}/metrics", *_urls(listed)]))[:_MAX_TARGETS]
    urls = [f"{address}?detail=all" for address in addresses]  # one of them may speak for a large world
    with ThreadPoolExecutor(32) as pool:
        answers = [answer for answer in pool.map(_try, urls) if answer is not None]
    if not answers:
        raise OSError(f"nobody answers at {base}/metrics; give the address that the job printed, or a run directory")
    return _assembled(base, answers)


def _urls(listed: Any) -> list[str]:
    found = []
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("targets"), list):
            labels = entry.get("labels")
            scheme = labels.get("__scheme__", "http") if isinstance(labels, dict) else "http"
            found += [f"{scheme}://{target}/metrics" for target in entry["targets"] if scheme in {"http", "https"}]
    return found


def _try(url: str) -> str | None:
    try:
        return _fetch(url)
    except (OSError, ValueError):
        return None


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http address")
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:  # noqa: S310 - checked above
        return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))


#: What is known of a rank's steps since the run began: their number, their time, and what that was made of.
_SUMMED = (
    "step_seconds_count",
    "step_seconds_sum",
    "own_seconds_total",
    "wait_seconds_total",
    "straggler_cost_seconds_total",
)
_GAUGES = {"loss": "loss", "grad_norm": "norm", "host_memory_bytes": "host"}


class _Gathered:
    """The samples of all endpoints, put together."""

    def __init__(self) -> None:
        self.views: dict[int, RankView] = {}
        self.differing: dict[str, int] = {}
        self.incidents: dict[tuple[str, str, str], float] = {}
        self.sums: dict[tuple[int, str], float] = {}  # over other labels
        self.phases: dict[int, dict[str, float]] = {}
        self.world, self.overhead = 0, math.nan
        self.off: set[str] = set()
        self.waiting: dict[str, Any] = {}

    def take(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take one sample of a rank."""
        rank, what = int(labels["rank"]), labels.get("what", "")
        match name:
            case "world_size" if value > 0:
                self.world = max(self.world, int(value))
            case "checks_off" if value > 0:
                self.off.add(labels.get("part", ""))
            case "missing_rank" if value > 0 and labels.get("missing", "").isdecimal():
                state = next((each.label for each in WaitState if each == value), "")
                ranks = {*self.waiting.get("ranks", ()), int(labels["missing"])}
                self.waiting = {"state": state, "ranks": ranks, "location": labels.get("location")}
            case "overhead_ratio":
                self.overhead = value
            case "ranks_disagreeing":
                self.differing[what] = max(self.differing.get(what, 0), int(value))
            case "incident_timestamp_seconds":
                told = f"ranks {labels.get('culprits', '')} · {labels.get('subject', '')}"
                self.incidents[labels.get("code", ""), labels.get("severity", ""), told] = value
            case _ if name in _SUMMED:
                self.sums[rank, name] = self.sums.get((rank, name), 0.0) + value
                if phase := labels.get("phase"):
                    self.phases.setdefault(rank, {})[phase] = value
            case _ if name in _OF_A_RANK:
                _heed(self.views.setdefault(rank, RankView(rank=rank)), name, labels, value)

    def snapshot(self, title: str) -> Snapshot:
        """Return what was gathered."""
        # a rank that speaks for very many knows what each costs in every step, and how long most took in few of them
        longest = max((value for (_, name), value in self.sums.items() if name == "step_seconds_sum"), default=0.0)
        for rank, view in self.views.items():
            count, seconds, own, wait, cost = (self.sums.get((rank, name), math.nan) for name in _SUMMED)
            count = count or math.nan
            view.step_seconds = view.mean_seconds = seconds / count
            view.phases = {phase: value / count for phase, value in self.phases.get(rank, {}).items()}
            view.own_seconds, view.wait_seconds, view.cost = own / count, wait / count, cost / (longest or math.nan)
        return Snapshot(
            title=title,
            world=self.world,
            ranks=[self.views[rank] for rank in sorted(self.views)],
            differing=self.differing,
            overhead=self.overhead,
            incidents=sorted(self.incidents, key=lambda key: self.incidents[key], reverse=True),
            unchecked=f"not checked, or not in all: {', '.join(sorted(self.off))}" if self.off else "",
            **_waiting(self.waiting),
        )


def _assembled(title: str, answers: Iterable[str]) -> Snapshot:
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only for this source

    gathered = _Gathered()
    for text in answers:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("rank", "").isdecimal():
                    gathered.take(sample.name.removeprefix("ddpdebug_"), sample.labels, sample.value)
    return gathered.snapshot(title)


_OF_A_RANK = {*_GAUGES, "step", "last_step_timestamp_seconds", "rank_up", "rank_outvoted", "device_memory_bytes"}


def _heed(view: RankView, name: str, labels: Mapping[str, str], value: float) -> None:
    if name in _GAUGES:
        setattr(view, _GAUGES[name], value)
    elif name == "step":
        view.step = int(value)
    elif name == "last_step_timestamp_seconds":
        view.age = time.time() - value
    elif name == "rank_up":
        view.ended = "" if value else "left"
    elif name == "rank_outvoted" and value and labels.get("what") in COMPARED:
        view.outvoted = (*view.outvoted, labels["what"])
    elif name == "device_memory_bytes" and labels.get("kind") == "reserved":
        view.device = value
