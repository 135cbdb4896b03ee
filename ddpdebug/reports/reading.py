"""The history of a run as series of bounded length, read from its run directory in one pass. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ddpdebug.detectors.hlth.curve import Followed, followed, loss_of
from ddpdebug.reports.pace import PaceHistory
from ddpdebug.run_directory.reader import damage, read_findings, read_outcomes, read_run, read_steps
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.pace import PHASES
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks.agreement import COMPARED, dissenters

#: So many points are kept of a series: more cannot be seen.
POINTS = 600
_Over = Callable[[Sequence[float]], float]
#: What a step is made of: the phases of a rank's own time, and its waiting for others.
PARTS = (*PHASES, "waiting")
#: The losses that the rules follow, of one kind where several train in turn.
FOLLOWED = "followed loss"
_MAX_RANKS = 4096

_NONFINITE = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE
#: What a point keeps of several steps: the extremes, so that a spike is seen, or the middle.
_KEEP: dict[str, _Over] = {"max": max, "min": min, "mean": fmean}
#: Series -> (field of the row, over ranks, over steps).
_FIELDS: dict[str, tuple[str, _Over, str]] = {
    "loss highest rank": ("loss", max, "max"),
    "loss median rank": ("loss", median, "mean"),
    "loss lowest rank": ("loss", min, "min"),
    "validation loss": ("val_loss", fmean, "mean"),
    "norm highest rank": ("grad_norm", max, "max"),
    "norm lowest rank": ("grad_norm", min, "min"),
    "step": ("step_seconds", max, "max"),
    "host": ("host_bytes", max, "max"),
    "device reserved": ("device_reserved_bytes", max, "max"),
    "device allocated": ("device_allocated_bytes", max, "max"),
}


@dataclass(slots=True)
class Thinned:
    """A series of at most twice `POINTS` points: neighbouring points are joined as it grows."""

    keep: str
    stride: int = 1
    points: list[tuple[int, float]] = field(default_factory=list)
    _open: list[float] = field(default_factory=list)
    _first: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; NaN stands for unknown."""
        if not self._open:
            self._first = step
        self._open.append(value)
        if len(self._open) >= self.stride:
            self._flush()
        if len(self.points) >= 2 * POINTS:
            halves = list(zip(self.points[::2], self.points[1::2], strict=True))
            self.points = [(one[0], self._join((one[1], two[1]))) for one, two in halves]
            self.stride *= 2

    def finish(self) -> list[tuple[int, float]]:
        """Return the points."""
        self._flush()
        return self.points

    def _flush(self) -> None:
        if self._open:
            self.points.append((self._first, self._join(self._open)))
            self._open = []

    def _join(self, values: Iterable[float]) -> float:
        known = [value for value in values if math.isfinite(value)]
        return float(_KEEP[self.keep](known)) if known else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The content of the page: series by step, findings, the ranks' outcomes.

    Args:
        series: name -> (step, value).
        agreement: what is compared -> (step, ranks outvoted), NaN where it was not compared.
        culprits: rank -> number of kept steps in which it was outvoted.
        undecided: number of kept steps in which ranks differed and nobody could tell which is right.
    """

    directory: Path
    run: Mapping[str, Any]
    findings: list[Finding]
    outcomes: Mapping[int, Mapping[str, Any]]
    series: Mapping[str, list[tuple[int, float]]]
    agreement: Mapping[str, list[tuple[int, float]]]
    culprits: Mapping[int, int]
    undecided: int
    steps: int
    first: int
    last: int
    pace: PaceHistory = field(default_factory=PaceHistory)
    damage: Sequence[str] = ()  # what cannot be read of the findings


def read_history(directory: Path) -> History:
    """Return the history of a run; raise ValueError if the directory is not that of a run of this version."""
    run = read_run(directory)
    series = {name: Thinned(keep) for name, (_, _, keep) in _FIELDS.items()}
    agreement = {what: Thinned("max") for what in COMPARED}
    series |= {part: Thinned("mean") for part in (*PARTS, FOLLOWED)}
    kinds: dict[str, Any] = {}
    pace = PaceHistory()
    culprits: dict[int, int] = {}
    count, first, last, undecided = 0, 0, 0, 0
    for step in _followed(read_steps(directory)):
        first = step.step if count == 0 else first
        count, last = count + 1, step.step
        kind = followed(step, kinds)
        for name, (column, over, _) in _FIELDS.items():
            if column == "loss" and not kind.loss:
                continue
            known = [float(value) for value in step.columns[column] if math.isfinite(value)]
            if known:
                series[name].add(step.step, float(over(known)))
            elif step.any(_NONFINITE):  # a gap; where nothing was computed the line goes on
                series[name].add(step.step, math.nan)
        series[FOLLOWED] = _with_loss(series[FOLLOWED], step, kind)
        pace.add(step)
        # of chosen rows most are of ranks that were slow in this step
        shown = islice(step.rows.values(), 1 if step.chosen else None)
        for part, seconds in _parts(row for row in shown if not row.has(Flag.FIRST)).items():
            series[part].add(step.step, seconds)
        found = dissenters(step)
        for what in COMPARED:
            agreement[what].add(step.step, len(found[what]) if what in found else math.nan)
        blamed = [ranks for ranks in found.values() if len(ranks) < len(step.everyone)]
        undecided += len(blamed) < len(found)
        for rank in frozenset().union(*blamed):
            if len(culprits) < _MAX_RANKS:
                culprits[rank] = culprits.get(rank, 0) + 1
    return History(
        directory=directory,
        run=run,
        findings=read_findings(directory),
        outcomes=read_outcomes(directory),
        series={name: thinned.finish() for name, thinned in series.items()},
        agreement={what: thinned.finish() for what, thinned in agreement.items()},
        culprits=dict(sorted(culprits.items())),
        undecided=undecided,
        steps=count,
        first=first,
        last=last,
        pace=pace,
        damage=damage(directory),
    )


def _with_loss(series: Thinned, step: Step, kind: Followed) -> Thinned:
    """Return the series of the losses that rules follow, with that of a step, if it is one; one anew where they do."""
    loss = loss_of(step)
    series = Thinned("mean") if kind.anew else series
    if kind.loss and loss is not None:
        series.add(step.step, loss)
    return series


def _parts(rows: Iterable[Row]) -> dict[str, float]:
    """Return part of the step -> its mean over the ranks that know how long theirs took; empty where none does."""
    known = [{**row.own_phases, "waiting": row.wait_seconds} for row in rows if row.step_seconds >= 0]
    return {part: fmean(each[part] for each in known) for part in PARTS} if known else {}


def _followed(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps of one optimizer: with several, one is enough for a picture.

    It is the first that is seen, until another has gone on for twice its longest interval: the script has made it anew.
    """
    chosen, last, longest = None, 0, 1
    for step in steps:
        passed = step.step - last
        if step.optimizer == chosen:
            longest = max(longest, passed)
        elif chosen is not None and passed <= 2 * longest:
            continue
        chosen, last = step.optimizer, step.step
        yield step
