"""The metrics with name, type, help text and labels, and the state of a rank that they are made from.

Every name that the endpoint serves stands here, whole, in the order in which it is served. `RankState` and `Layers` are
written by the exchange's thread and read by the server's: every field is replaced or counted up, never taken apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from statistics import median
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from ddpdebug.schema.coverage import Coverage, counted_off
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.run_state import End, RunState, WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import RunStarted, StepJudged, Waiting
from ddpdebug.sinks.agreement import COMPARED
from ddpdebug.sinks.words import clean, culprits_text

#: So many of the newest findings are shown with their names.
INCIDENTS = 5
#: Bounds of the step-time histogram are powers of this; these powers about that of the run's usual step
#: (docs/decisions/030-step-times.md).
_RESOLUTION = 1.2
_POWERS = (*range(-3, 7), 10, 16, 26)
#: The usual step is the median of so many, after the first ones; of fewer once these have taken so many seconds.
_FIRST_STEPS, _USUAL_STEPS, _FEW_STEPS, _LONG = 2, 16, 4, 60.0
PHASES = ("data", "forward", "backward", "optimizer", "other")
#: What a rank waits in: DDP's reduction after its own last gradient, and other collectives.
WAITS = ("reduction", "collectives")
#: Memory is going to be full where the minima of so many blocks in a row have risen, each rise at least this share of
#: the mean one, and all by so many bytes and this share of what is used; a block has so many seconds and steps.
_BLOCKS, _STEADY, _GROWN, _GROWN_SHARE = 6, 0.3, 8 << 20, 0.002
_BLOCK_SECONDS, _BLOCK_STEPS = 10.0, 4
#: Findings about a NaN or an infinity that somebody has made.
_MADE = frozenset({"NUM301", "NUM302", "NUM303", "NUM304", "NUM305", "NUM309"})
#: Gauge -> field of the row, help; NaN in a step that did not compute it leaves the last known value.
GAUGES = {
    "ddpdebug_loss": ("loss", "Mean loss of the last step, unscaled, as given to backward."),
    "ddpdebug_grad_norm": (
        "grad_norm",
        "2-norm of the gradients after the reduction, before clipping, without the loss scale.",
    ),
    "ddpdebug_local_grad_norm": (
        "local_grad_norm",
        "2-norm of the rank's own gradients before the reduction, without the loss scale.",
    ),
    "ddpdebug_loss_scale": ("loss_scale", "Scale of the gradient scaler."),
    "ddpdebug_learning_rate": ("lr", "Learning rate of the first parameter group."),
    "ddpdebug_clip_threshold": ("clip_max", "Norm to which gradients are clipped."),
    "ddpdebug_param_norm": ("param_norm", "2-norm of the weights in the last sampled step; rank 0 only."),
    "ddpdebug_update_norm": ("update_norm", "2-norm of their change in that step; rank 0 only."),
    "ddpdebug_val_loss": (
        "val_loss",
        "Validation loss, given by observe(), or as seen in evaluations.",
    ),
}
#: Gauge -> field of the newest row of any optimizer, help; 0 where the system does not report it.
_MEMORY = {
    "ddpdebug_host_memory_bytes": ("host_bytes", "Resident memory of the process."),
    "ddpdebug_host_private_memory_bytes": ("host_private_bytes", "Of these, neither backed by a file nor shared."),
    "ddpdebug_host_memory_limit_bytes": ("host_limit_bytes", "Memory limit of the control group, or of the machine."),
    "ddpdebug_loader_memory_bytes": ("workers_bytes", "Private memory of the DataLoader's workers."),
}
#: Kind -> field of the row, bytes.
_DEVICE_MEMORY = {
    "allocated": "device_allocated_bytes",
    "reserved": "device_reserved_bytes",
    "peak": "device_peak_bytes",
    "inactive": "device_inactive_bytes",
}
#: Gauge -> help; the layers that stand out most have so many slots.
_LAYERS = {
    "ddpdebug_layer_update_ratio": "Change of a weight over its norm in the last sampled step: the largest, by slot.",
    "ddpdebug_layer_grad_norm": "2-norm of a weight's gradient in the last sampled step: the largest, by slot.",
    "ddpdebug_layer_dead_units": (
        "Share of an activation's units that were zero for all inputs of the last samples: the largest."
    ),
    "ddpdebug_layer_saturation": (
        "Share of an activation's values at the end of its range in the last sample: the largest."
    ),
}
SLOTS = 2
#: Another layer takes a slot where its value is so many times that of the layer that has it.
_LAYER_WORSE = 1.25
#: So many names each of the four metrics has in a run; layers after those are `other`, so that series do not add up.
LAYER_NAMES = 20
OTHER = "other"
#: What is true of a process also when it has gone, by the names of the families.
LASTING = frozenset(
    f"ddpdebug_{name}"
    for name in ("run_info", "rank_info", "findings", "internal_errors", "incident_step", "incident_timestamp_seconds")
)
#: What was not finite -> the flag that says so.
NONFINITE = {
    "loss": int(Flag.LOSS_NONFINITE),
    "local_gradients": int(Flag.LOCAL_GRADS_NONFINITE),
    "gradients": int(Flag.GRADS_NONFINITE),
    "inputs": int(Flag.INPUT_NONFINITE),
    "outputs": int(Flag.FORWARD_NONFINITE),
    "parameters": int(Flag.PARAMS_NONFINITE),
}

_GAUGE_VALUES = attrgetter(*(field for field, _ in GAUGES.values()))
_PHASE_VALUES = attrgetter(*(f"{phase}_seconds" for phase in PHASES))
#: In such a step NaN is a value or says that there is none.
_CERTAIN = int(Flag.CHECKED | Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE)
#: So many gauges are known in every step that is certain; those after them rarely.
_OFTEN = list(GAUGES).index("ddpdebug_param_norm")
#: Those that end with the weights.
_OF_WEIGHTS = (_OFTEN, _OFTEN + 1)
_LOST = int(Flag.PARAMS_NONFINITE)
_ANY_NONFINITE = sum(NONFINITE.values())
_FIRST, _SKIPPED, _CHECKED = int(Flag.FIRST), int(Flag.SKIPPED), int(Flag.CHECKED)
_GUARDED = int(Flag.GUARD_SKIPPED)
_UNSYNCED = int(Flag.UNSYNCED_BACKWARD | Flag.BYPASS)
#: Nothing that a layer shows is worth a line any more.
_BROKEN = int(Flag.LOSS_NONFINITE | Flag.PARAMS_NONFINITE)
#: So many checked steps lie between two samples of the layers at most (probes/layer_statistics.py), and so many times
#: that distance is a sample shown.
_SAMPLED_EVERY, _SAMPLES_MISSED = 64, 2


class Pace:
    """The bounds of the step-time histogram in seconds: around the run's usual step, fixed once that is known.

    They follow from the rows of all ranks, so that they are the same wherever these are seen.
    """

    def __init__(self) -> None:
        self.bounds: tuple[float, ...] = ()
        self._seen: list[float] = []

    def learn(self, step: Step) -> None:
        """Learn the usual step time from a step of all ranks."""
        if self.bounds or not (known := [s for s in step.columns["step_seconds"] if s > 0]):
            return
        self._seen.append(median(known))
        usual = self._seen[_FIRST_STEPS:]
        if len(usual) >= _USUAL_STEPS or (len(usual) >= _FEW_STEPS and sum(usual) >= _LONG):
            power = round(math.log(median(usual), _RESOLUTION))
            self.bounds = tuple([float(f"{_RESOLUTION ** (power + i):.3g}") for i in _POWERS])


class Filling:
    """The time until a memory is full, at its present growth.

    Blocks of steps count with their minimum, which knows nothing of evaluations and long batches in between.
    """

    def __init__(self) -> None:
        self._minima: deque[tuple[float, int]] = deque(maxlen=_BLOCKS)  # when the block began, bytes
        self._lowest: int | None = None
        self._began, self._steps = 0.0, 0
        self._rate = 0.0  # bytes a second, 0 where it does not grow
        self._left = 0

    def add(self, now: float, used: int, limit: int) -> None:
        """Add the used bytes at a time; 0 stands for unknown."""
        if used <= 0:
            return
        self._left = max(0, limit - used) if limit > 0 else -1
        if self._lowest is None:
            self._began, self._lowest, self._steps = now, used, 0
        elif used < self._lowest:
            self._lowest = used
        self._steps += 1
        if self._steps >= _BLOCK_STEPS and now - self._began >= _BLOCK_SECONDS:
            self._minima.append((self._began, self._lowest))
            self._lowest = None
            self._rate = self._growth()

    def _growth(self) -> float:
        (first, least), (last, most) = self._minima[0], self._minima[-1]
        rises = [after - before for (_, before), (_, after) in pairwise(self._minima)]
        if len(self._minima) < _BLOCKS or most - least < max(_GROWN, _GROWN_SHARE * most):
            return 0.0
        return (most - least) / (last - first) if min(rises) >= _STEADY * (most - least) / len(rises) else 0.0

    @property
    def seconds(self) -> float | None:
        """The seconds until the memory is full; None if it does not grow or its limit is unknown."""
        return self._left / self._rate if self._rate > 0 and self._left >= 0 else None


class RankState:
    """The newest row of one rank, and its counts since the start of the run; updated once per step."""

    def __init__(self) -> None:
        self.row: Row | None = None  # of the optimizer that is followed
        self.newest: Row | None = None  # of any optimizer
        self.seen = 0.0
        self.up = True
        self.waiting = 0.0  # seconds so far
        self.values = [math.nan] * len(GAUGES)
        self.bounds: tuple[float, ...] = ()
        self.buckets: list[int] = []  # one more than bounds, none before these are known
        self._early: list[float] = []  # step times until then
        self.step_count = 0
        self.step_seconds = 0.0
        self.phase_seconds = [0.0] * len(PHASES)
        self.phase_counts = [0] * len(PHASES)
        self.own_seconds = [0.0] * len(PHASES)
        self.wait_seconds = [0.0] * len(WAITS)
        self.cost_seconds = 0.0
        self.steps = self.checked = self.skipped = self.clipped = self.unsynced = self.guarded = 0
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        self.filling = {"host": Filling(), "device": Filling()}
        # where it runs
        self.node = ""
        self.local_rank = ""
        self.gpu = ""

    def add(
        self,
        row: Row,
        now: float,
        bounds: tuple[float, ...] = (),
        *,
        host_bytes: int | None = 0,
        cost: float = 0.0,
        events: bool = True,
        times: bool = True,
    ) -> None:
        """Add one row; called once per rank and step.

        Args:
            bounds: of the step-time histogram, once they are known.
            host_bytes: what all ranks use that share this one's limit; None where that is not known.
            cost: seconds by which the rank made the step longer.
            events: count the step; otherwise it is counted by `took`.
            times: it is not here because it was slow.
        """
        self.newest, self.seen = row, now
        if host_bytes is not None:
            self.filling["host"].add(now, host_bytes, row.host_limit_bytes)
        self.filling["device"].add(now, row.device_allocated_bytes, row.device_limit_bytes)
        flags = row.flags
        if events:
            self.took(1, flags, clipped=row.clip_norm > row.clip_max)
        if self.row is not None and row.optimizer != self.row.optimizer and row.step <= self.row.step:
            return
        self.row = row
        certain, lost = flags & _CERTAIN, flags & _LOST
        for i, value in enumerate(_GAUGE_VALUES(row)):
            # NaN: keep the last known value, where it is not the value
            if value == value or (certain and i < _OFTEN) or (lost and i in _OF_WEIGHTS):  # noqa: PLR0124
                self.values[i] = value
        if flags & _FIRST:  # it has the start of the script in it
            return
        if row.step_seconds >= 0:
            self.cost_seconds += cost
        if times:
            self._take_times(row, bounds)

    def took(self, steps: int, flags: int, *, clipped: bool) -> None:
        """Count steps with known flags."""
        self.steps += steps
        self.clipped += steps * clipped
        if flags:
            self._count(flags, steps)

    def _take_times(self, row: Row, bounds: tuple[float, ...]) -> None:
        for i, seconds in enumerate(_PHASE_VALUES(row)):
            if seconds >= 0:  # not when unknown, which is NaN
                self.phase_seconds[i] += seconds
                self.phase_counts[i] += 1
        if row.step_seconds >= 0:
            self._time(row.step_seconds, bounds)
            self._share(row)

    def _time(self, seconds: float, bounds: tuple[float, ...]) -> None:
        self.step_count += 1
        self.step_seconds += seconds
        self._early.append(seconds)
        if bounds:
            buckets = self.buckets or [0] * (len(bounds) + 1)
            for each in self._early:
                buckets[bisect_left(bounds, each)] += 1
            self._early.clear()
            self.bounds, self.buckets = bounds, buckets

    def _share(self, row: Row) -> None:
        """Share the time of a step between what was the rank's own and what it waited for others."""
        for i, seconds in enumerate(row.own_phases.values()):
            self.own_seconds[i] += seconds
        collectives = row.collective_seconds if row.collective_seconds > 0 else 0.0
        self.wait_seconds[0] += row.wait_seconds - collectives
        self.wait_seconds[1] += collectives

    def _count(self, flags: int, steps: int) -> None:
        self.checked += steps * bool(flags & _CHECKED)
        self.skipped += steps * bool(flags & _SKIPPED)
        self.guarded += steps * bool(flags & _GUARDED)
        self.unsynced += steps * bool(flags & _UNSYNCED)
        if flags & _ANY_NONFINITE:
            for what, bit in NONFINITE.items():
                if flags & bit:
                    self.nonfinite[what] += steps


class Layers:
    """The most extreme layers of this rank's newest sample, each in a slot that it keeps."""

    def __init__(self) -> None:
        self._worst: dict[str, list[tuple[float, str]]] = {}
        self._named: dict[str, set[tuple[int, str]]] = {name: set() for name in _LAYERS}
        self._step, self._interval = 0, 1

    def take(self, detail: Mapping[str, Any], step: int, interval: int) -> None:
        """Take a detail of the kind `layers` (schema/details.py); a layer without a new number loses its slot.

        Args:
            interval: between two checked steps.
        """
        parameters, seen = dict(_tables(detail.get("parameters"))), dict(_tables(detail.get("modules")))
        weights = {name: about for name, about in parameters.items() if about.get("dim", 0) > 1}
        found: dict[str, dict[str, Any]] = {}
        if parameters:
            found["ddpdebug_layer_update_ratio"] = {
                name: _ratio(about.get("update"), about.get("norm")) for name, about in weights.items()
            }
            found["ddpdebug_layer_grad_norm"] = {name: about.get("grad_norm") for name, about in weights.items()}
        if seen:
            found["ddpdebug_layer_dead_units"] = {name: about.get("zero_units") for name, about in seen.items()}
            found["ddpdebug_layer_saturation"] = {name: about.get("saturated") for name, about in seen.items()}
        worst = self._worst | {what: _seated(self._worst.get(what, ()), table) for what, table in found.items()}
        self._worst, self._step, self._interval = worst, step, interval

    def metrics(self, rank: str, row: Row | None, interval: int) -> Iterator[Metric]:
        """Yield a family of each kind; empty before the first sample, after a NaN, and if the newest sample is old.

        Args:
            row: the newest of the rank.
            interval: between two checked steps, now.
        """
        missed = _SAMPLES_MISSED * _SAMPLED_EVERY * max(interval, self._interval)
        old = row is not None and row.step - self._step > missed
        worst = {} if row is not None and (old or row.flags & _BROKEN) else self._worst
        for name, text in _LAYERS.items():
            slots = enumerate(worst.get(name, ()), 1)
            values = (((rank, str(slot), self._name(name, slot, layer)), value) for slot, (value, layer) in slots)
            yield _gauge(name, text, values, "slot", "layer")

    def _name(self, metric: str, slot: int, layer: str) -> str:
        named, shown = self._named[metric], clean(layer, 120)
        if len(named) < LAYER_NAMES:
            named.add((slot, shown))
        return shown if (slot, shown) in named else OTHER


def _seated(before: Sequence[tuple[float, str]], table: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return who has the slots: who had one keeps it, until it is gone or another layer is far larger."""
    known = {name: float(value) for name, value in table.items() if _is_number(value)}
    others = sorted(known.keys() - {name for _, name in before}, key=lambda name: (-known[name], name))
    seats = [name if name in known else others.pop(0) for _, name in before if name in known or others]
    seats += [others.pop(0) for _ in range(min(SLOTS - len(seats), len(others)))]
    for name in others[:SLOTS]:
        least = min(range(len(seats)), key=lambda slot: known[seats[slot]])
        if known[name] > _LAYER_WORSE * known[seats[least]]:
            seats[least] = name
    return [(known[name], name) for name in seats]


def _tables(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, about in value.items() if isinstance(value, dict) else ():
        if isinstance(about, dict):
            yield str(name), about


def _ratio(update: Any, norm: Any) -> float | None:
    return update / norm if _is_number(update) and _is_number(norm) and norm > 0 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- the families, in the order in which they are served --------------------------------------------------------------

#: Label values, the rank first, and the value.
_Samples = Iterable[tuple[Sequence[str], float]]
#: Ranks as labels, with what is known of them.
_Ranks = Sequence[tuple[str, RankState]]


def _filled(family: Any, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    made: Metric = family
    return made


def _gauge(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=("rank", *labels)), samples)


def _counter(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=("rank", *labels)), samples)


def run_metrics(own: str, started: RunStarted | None) -> Iterator[Metric]:
    """Yield the run's identity, world size and budget; NaN before the run has begun."""
    world, budget = float("nan"), float("nan")
    # `job` is Prometheus's own word
    names = ("scheduler_job", "world_size", "torch", "ddpdebug", "out")
    run = GaugeMetricFamily("ddpdebug_run_info", "The run that is watched; always 1.", labels=names)
    if started is not None:
        world, budget = started.world, float(started.config.get("budget", budget))
        found = started.versions
        out = "" if started.directory is None else clean(started.directory.name, 120)
        versions = found.get("torch", ""), found.get("ddpdebug", "")
        run.add_metric([clean(started.scheduler_job, 60), str(world), *versions, out], 1)
    yield run
    yield _gauge("ddpdebug_world_size", "Ranks that the run was started with.", [((own,), world)])
    text = "Share of the run's time that ddpdebug may take."
    yield _gauge("ddpdebug_overhead_budget_ratio", text, [((own,), budget)])


def identity_of(started: RunStarted | None) -> dict[str, str]:
    """Return the labels of every series: id and name of the run; none before it has begun."""
    return {} if started is None else {"run_id": started.run_id, "run": started.name or started.run_id}


def state_metrics(own: str, state: RunState, end: End | None, seconds: float) -> Iterator[Metric]:
    """Yield the state of this process; after its end also outcome and time (seconds since the epoch)."""
    codes = ", ".join(f"{each.value} {each.label}" for each in RunState)
    yield _gauge("ddpdebug_run_state", f"State of this process: {codes}.", [((own,), state)])
    text = "What came of it, once it has ended; always 1. cause is a finding, an exception or a signal, if any."
    ends = [] if end is None else [((own, end.outcome, clean(end.cause, 60)), 1.0)]
    yield _gauge("ddpdebug_run_outcome_info", text, ends, "outcome", "cause")
    text = "When it ended, in seconds since the epoch."
    yield _gauge("ddpdebug_run_end_timestamp_seconds", text, [] if end is None else [((own,), seconds)])


def finding_metrics(own: str, findings: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Yield the counts of findings by code and severity."""
    yield _counter(
        "ddpdebug_findings",
        "Findings raised, each once however often it occurs; without a code, a zero of each severity.",
        (((own, code, severity), count) for (code, severity), count in sorted(findings.items())),
        "code",
        "severity",
    )


def agreement_metrics(
    own: str, outvoted: Mapping[str, Mapping[int, frozenset[int]]], disagreements: Mapping[str, int], apart: int
) -> Iterator[Metric]:
    """Yield the number of ranks outvoted last, the number of steps with any, and the ranks' distance in steps.

    `outvoted` is by optimizer.
    """
    text = "Steps between the fastest and the slowest rank at one moment: 0 while they take each step together."
    yield _gauge("ddpdebug_steps_apart", text, [((own,), apart)])
    yield _gauge(
        "ddpdebug_ranks_disagreeing",
        "Ranks outside the largest group of equals when this was last compared (all where no group is the largest).",
        (((own, what), max(map(len, found.values()), default=0)) for what, found in outvoted.items()),
        "what",
    )
    yield _counter(
        "ddpdebug_disagreements",
        "Steps in which the ranks were compared and did not agree.",
        (((own, what), count) for what, count in disagreements.items()),
        "what",
    )


def hang_metrics(own: str, waiting: Waiting) -> Iterator[Metric]:
    """Yield the verdict about waiting ranks, and the ranks that they wait for."""
    codes = ", ".join(f"{each.value} {each.label}" for each in WaitState)
    text = f"Verdict about ranks that wait for others: {codes}. From 3 on it is a hang."
    yield _gauge("ddpdebug_hang_state", text, [((own,), waiting.state)])
    text = "Ranks that others wait for, by the label missing; the value is that of ddpdebug_hang_state. Absent while 0."
    where = clean(waiting.phase or "", 40), clean(waiting.location or "", 160)
    ranks = (((own, str(rank), *where), waiting.state) for rank in waiting.ranks)
    yield _gauge("ddpdebug_missing_rank", text, ranks if waiting.state else (), "missing", "phase", "location")


def own_metrics(
    own: str, errors: int, coverage: Coverage | None, last: StepJudged | None, now: float
) -> Iterator[Metric]:
    """Yield ddpdebug's own state: time of rendering, failures, coverage, overhead, check interval."""
    nan = float("nan")
    text = "When these values were taken, in seconds since the epoch: an answer may be repeated for a while."
    yield _gauge("ddpdebug_render_timestamp_seconds", text, [((own,), now)])
    complete = None if coverage is None else coverage.complete
    text = "Parts of ddpdebug that failed and switched themselves off."
    yield _counter("ddpdebug_internal_errors", text, [((own,), errors)])
    text = "1 while everything is checked that normally is, 0 while something is not, NaN until that is certain."
    yield _gauge("ddpdebug_coverage_complete", text, [((own,), nan if complete is None else complete)])
    text = "Ranks that are compared with each other: 0 while none are, 1 in a world of one."
    yield _gauge("ddpdebug_ranks_compared", text, [((own,), 0 if coverage is None else coverage.compared_now)])
    text = "Things that are not checked, by what they are about; absent where there are none."
    off = counted_off(coverage) if coverage is not None and complete is False else {}
    yield _gauge("ddpdebug_checks_off", text, (((own, part), count) for part, count in sorted(off.items())), "part")
    text = "Time in ddpdebug on the worst rank over the time of the steps without it, of the newest 64 steps."
    yield _gauge("ddpdebug_overhead_ratio", text, [((own,), nan if last is None else last.overhead_ratio)])
    text = "The full check runs every so many steps."
    yield _gauge("ddpdebug_check_interval_steps", text, [((own,), nan if last is None else last.interval)])


def is_about_making(finding: Finding) -> bool:
    """Whether a finding names the ranks that produced a NaN or an infinity."""
    return finding.code in _MADE and bool(finding.ranks)


def incident_metrics(own: str, incidents: Iterable[tuple[Finding, float]]) -> Iterator[Metric]:
    """Yield the newest findings by name: step and time (seconds since the epoch) of each one's beginning."""
    steps: list[tuple[Sequence[str], float]] = []
    times: list[tuple[Sequence[str], float]] = []
    for finding, seconds in incidents:
        subject = clean(finding.subject[0] if finding.subject else finding.phase or "", 120)
        culprits = culprits_text(finding, places=False).partition(" ")[2] if finding.ranks else ""
        where = clean(finding.location or "", 160)
        labels = (own, clean(finding.id, 80), finding.code, finding.severity.label, subject, culprits, where)
        steps.append((labels, float("nan") if finding.step is None else finding.step))
        times.append((labels, seconds))
    names = ("incident", "code", "severity", "subject", "culprits", "location")
    yield _gauge("ddpdebug_incident_step", f"First step of each of the {INCIDENTS} newest findings.", steps, *names)
    text = f"When each of the {INCIDENTS} newest findings was raised, in seconds since the epoch."
    yield _gauge("ddpdebug_incident_timestamp_seconds", text, times, *names)


class EachRank:
    """Makes the families of single ranks, with a sample for each rank, or several with further labels."""

    def shows(self, rank: str) -> bool:
        """Whether the series of a rank are exported."""
        del rank
        return True

    def gauge(self, name: str, text: str, samples: _Samples, *labels: str, whole: bool = False) -> Iterator[Metric]:
        """Yield a gauge; `whole` asks for all ranks."""
        del whole
        yield _gauge(name, text, samples, *labels)

    def counter(self, name: str, text: str, samples: _Samples, *labels: str) -> Iterator[Metric]:
        """Yield a counter; its name has no `_total`."""
        yield _counter(name, text, samples, *labels)

    def more(self, ranks: _Ranks) -> Iterator[Metric]:
        """Yield families over all ranks together."""
        del ranks
        yield from ()


def rank_metrics(
    ranks: _Ranks, outvoted: Mapping[str, frozenset[int]], origin: frozenset[int], of: EachRank
) -> Iterator[Metric]:
    """Yield the metrics of single ranks: place, rows, events, times, memory, votes.

    Args:
        origin: ranks that have made the first NaN.
    """
    yield _gauge(
        "ddpdebug_rank_info",
        "Where the rank runs; always 1. gpu_uuid is empty without a GPU.",
        (((rank, s.local_rank, s.node, s.gpu), 1) for rank, s in ranks if s.local_rank and of.shows(rank)),
        "local_rank",
        "node",
        "gpu_uuid",
    )
    text = "1 while the rank takes part in the steps; 0 once it has left."
    yield from of.gauge("ddpdebug_rank_up", text, (((rank,), float(s.up)) for rank, s in ranks), whole=True)
    text = "Seconds for which the rank has been waiting for others where it waits now; 0 while it goes on."
    yield from of.gauge("ddpdebug_waiting_seconds", text, (((rank,), s.waiting) for rank, s in ranks))
    yield from _row_metrics(ranks, of)
    yield from _event_metrics(ranks, of)
    yield from _time_metrics(ranks, of)
    yield from _memory_metrics(ranks, of)
    text = (
        "1 while the rank was outvoted when this was last compared (all ranks where no group of equals is the largest)."
    )
    votes = (((rank, what), int(rank) in outvoted[what]) for rank, _ in ranks for what in COMPARED)
    yield from of.gauge("ddpdebug_rank_outvoted", text, votes, "what")
    text = "1 on the ranks that have made the run's first NaN or infinity, by the finding about it; 0 on the others."
    yield from of.gauge("ddpdebug_nonfinite_origin", text, (((rank,), int(rank) in origin) for rank, _ in ranks))
    yield from of.more(ranks)


def _row_metrics(ranks: _Ranks, of: EachRank) -> Iterator[Metric]:
    known = [((rank,), s.row, s.seen) for rank, s in ranks if s.row is not None]
    yield from of.gauge(
        "ddpdebug_step", "Last optimizer step, counted from 0.", ((rank, row.step) for rank, row, _ in known)
    )
    text = "When the rank's last step was seen, in seconds since the epoch."
    yield from of.gauge("ddpdebug_last_step_timestamp_seconds", text, ((rank, seen) for rank, _, seen in known))
    text = "Trainable parameters that had no gradient in the last step."
    yield from of.gauge(
        "ddpdebug_parameters_without_gradient", text, ((rank, row.without_grad) for rank, row, _ in known)
    )
    for i, (name, (_, text)) in enumerate(GAUGES.items()):
        yield from of.gauge(name, f"{text} NaN where unknown.", [((rank,), s.values[i]) for rank, s in ranks])


def _event_metrics(ranks: _Ranks, of: EachRank) -> Iterator[Metric]:
    """Yield counters of steps; all exist before the first event."""

    def counter(name: str, text: str, value: Callable[[RankState], float]) -> Iterator[Metric]:
        return of.counter(name, text, (((rank,), value(state)) for rank, state in ranks))

    yield from counter("ddpdebug_steps", "Optimizer steps seen, of all optimizers.", lambda s: s.steps)
    yield from counter("ddpdebug_checked_steps", "Steps in which the full check ran.", lambda s: s.checked)
    yield from counter("ddpdebug_skipped_steps", "Steps that the gradient scaler did not take.", lambda s: s.skipped)
    text = "Steps that the numeric guard kept all ranks from taking."
    yield from counter("ddpdebug_guard_skipped_steps", text, lambda s: s.guarded)
    yield from counter("ddpdebug_clipped_steps", "Steps whose gradients were clipped.", lambda s: s.clipped)
    text = "Steps into which gradients went that no DDP had reduced."
    yield from counter("ddpdebug_unsynchronised_steps", text, lambda s: s.unsynced)
    text = "Steps in which this was NaN or infinite on the rank."
    values = (((rank, what), s.nonfinite[what]) for rank, s in ranks for what in NONFINITE)
    yield from of.counter("ddpdebug_nonfinite_steps", text, values, "what")


def _time_metrics(ranks: _Ranks, of: EachRank) -> Iterator[Metric]:
    text = "Time from step to step, without the first one; the buckets are chosen about the run's usual step."
    steps = HistogramMetricFamily("ddpdebug_step_seconds", text, labels=("rank",))
    text = (
        "Time of the phases of a step but the first; data is the wait for the loader, other what is in no other phase"
        " and no collective. Backward has the wait for other ranks in it: ddpdebug_own_seconds_total is without."
    )
    phases = SummaryMetricFamily("ddpdebug_phase_seconds", text, labels=("rank", "phase"))
    for rank, state in ranks:
        if not of.shows(rank):
            continue
        bounds, buckets = (*map(str, state.bounds), "+Inf"), tuple(state.buckets)
        if len(bounds) == len(buckets):
            totals = accumulate(buckets)
            steps.add_metric([rank], list(zip(bounds, totals, strict=True)), state.step_seconds)
        else:  # all buckets appear at once, so that they have grown alike in each window
            steps.add_sample("ddpdebug_step_seconds_count", {"rank": rank}, state.step_count)
            steps.add_sample("ddpdebug_step_seconds_sum", {"rank": rank}, state.step_seconds)
        for i, phase in enumerate(PHASES):
            phases.add_metric([rank, phase], state.phase_counts[i], state.phase_seconds[i])
    yield steps
    yield phases
    text = (
        "Time of the steps but the first that was the rank's own, by phase; backward until its last gradient. With"
        " ddpdebug_wait_seconds_total this is ddpdebug_step_seconds_sum."
    )
    shown = [(rank, state) for rank, state in ranks if of.shows(rank)]  # of all ranks there are means
    own = (((rank, phase), s.own_seconds[i]) for rank, s in shown for i, phase in enumerate(PHASES))
    yield _counter("ddpdebug_own_seconds", text, own, "phase")
    text = (
        "Time of the steps but the first in which the rank waited for others or exchanged data with them: in DDP's"
        " reduction after its own last gradient, and in other collectives."
    )
    waits = (((rank, kind), s.wait_seconds[i]) for rank, s in shown for i, kind in enumerate(WAITS))
    yield _counter("ddpdebug_wait_seconds", text, waits, "kind")
    text = (
        "Seconds by which the rank made steps longer: its own time above the next slowest rank's, summed over the"
        " steps but the first in which it was last. Some rank is last in every step: compare it with the other ranks'."
    )
    yield from of.counter("ddpdebug_straggler_cost_seconds", text, (((rank,), s.cost_seconds) for rank, s in ranks))


def _memory_metrics(ranks: _Ranks, of: EachRank) -> Iterator[Metric]:
    known = [(rank, s.newest) for rank, s in ranks if s.newest is not None]
    for name, (field, text) in _MEMORY.items():
        yield from of.gauge(name, text, [((rank,), getattr(row, field)) for rank, row in known])
    text = "Seconds until the memory is full at its present growth; absent where it does not grow."
    times = ((rank, kind, filling.seconds) for rank, s in ranks for kind, filling in s.filling.items())
    full = [((rank, kind), seconds) for rank, kind, seconds in times if seconds is not None]
    yield from of.gauge("ddpdebug_memory_full_seconds", text, full, "kind")
    # absent where there is none, also no limit that was set for tensors of the CPU
    devices = [(rank, row) for rank, row in known if row.device_limit_bytes or row.device_peak_bytes]
    text = "Memory of the device, or the limit set for tensors of the CPU; absent without either."
    yield from of.gauge(
        "ddpdebug_device_memory_limit_bytes", text, (((rank,), row.device_limit_bytes) for rank, row in devices)
    )
    text = "Allocations on the device that succeeded only after the cache was emptied."
    yield from of.counter("ddpdebug_allocation_retries", text, (((rank,), row.device_retries) for rank, row in devices))
    text = "Memory of the device, as torch's allocator counts it."
    values = (((rank, kind), getattr(row, field)) for rank, row in devices for kind, field in _DEVICE_MEMORY.items())
    yield from of.gauge("ddpdebug_device_memory_bytes", text, values, "kind")
