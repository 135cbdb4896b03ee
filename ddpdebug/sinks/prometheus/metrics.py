"""The metrics by name, type, help text and labels, and what is remembered of a rank for them between steps.

Every name that the endpoint serves stands here, whole, in the order in which it is served. `RankState` and `Layers` are
written by the exchange's thread and read by the server's: every field is replaced or counted up, never taken apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
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
from ddpdebug.schema.run_state import End, RunState
from ddpdebug.sinks import RunStarted, StepJudged
from ddpdebug.sinks.agreement import COMPARED
from ddpdebug.sinks.text import clean, ranks_text

#: So many of the newest findings are shown with their names.
INCIDENTS = 5
#: Upper bounds of the step-time histogram, seconds.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
BOUNDS = (*map(str, BUCKETS), "+Inf")
PHASES = ("data", "forward", "backward", "optimizer")
#: Gauge -> field of the row, help; NaN in a step that did not compute it leaves the last known value.
GAUGES = {
    "ddpdebug_loss": ("loss", "Mean loss of the last step, unscaled, as given to backward."),
    "ddpdebug_grad_norm": ("grad_norm", "2-norm of the gradients after the reduction, before clipping."),
    "ddpdebug_local_grad_norm": ("local_grad_norm", "2-norm of the rank's own gradients before the reduction."),
    "ddpdebug_loss_scale": ("loss_scale", "Scale of the gradient scaler."),
    "ddpdebug_learning_rate": ("lr", "Learning rate of the first parameter group."),
    "ddpdebug_clip_threshold": ("clip_max", "Norm to which gradients are clipped."),
    "ddpdebug_param_norm": ("param_norm", "2-norm of the weights in the last sampled step; rank 0 only."),
    "ddpdebug_update_norm": ("update_norm", "2-norm of their change in that step; rank 0 only."),
    "ddpdebug_val_loss": (
        "val_loss",
        "Validation loss, as the script told it by observe(), or as seen in its evaluations.",
    ),
}
#: Gauge -> field of the newest row of any optimizer, help; 0 where the system does not tell.
_MEMORY = {
    "ddpdebug_host_memory_bytes": ("host_bytes", "Resident memory of the process."),
    "ddpdebug_host_private_memory_bytes": ("host_private_bytes", "Of these, neither backed by a file nor shared."),
    "ddpdebug_host_memory_limit_bytes": ("host_limit_bytes", "Memory limit of the control group, or of the machine."),
    "ddpdebug_loader_memory_bytes": ("workers_bytes", "Private memory of the DataLoader's workers."),
    "ddpdebug_device_memory_limit_bytes": ("device_limit_bytes", "Memory of the device."),
    "ddpdebug_allocation_retries": ("device_retries", "Allocations that succeeded only after the cache was emptied."),
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
_ANY_NONFINITE = sum(NONFINITE.values())
_SKIPPED, _CHECKED = int(Flag.SKIPPED), int(Flag.CHECKED)
_GUARDED = int(Flag.GUARD_SKIPPED)
_UNSYNCED = int(Flag.UNSYNCED_BACKWARD | Flag.BYPASS)


class RankState:
    """The newest row of one rank and its counts since the run began; updated once per step."""

    def __init__(self) -> None:
        self.row: Row | None = None  # of the optimizer that is followed
        self.newest: Row | None = None  # of any optimizer
        self.seen = 0.0
        self.up = True
        self.values = [math.nan] * len(GAUGES)
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.step_seconds = 0.0
        self.phase_seconds = [0.0] * len(PHASES)
        self.phase_counts = [0] * len(PHASES)
        self.steps = self.checked = self.skipped = self.clipped = self.unsynced = self.guarded = 0
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        # where it runs
        self.node = ""
        self.local_rank = ""
        self.gpu = ""

    def add(self, row: Row, now: float) -> None:
        """Take one row; called once per rank and step."""
        self.newest, self.seen = row, now
        flags = row.flags
        self.steps += 1
        if flags:
            self._count(flags)
        if row.clip_norm > row.clip_max:
            self.clipped += 1
        if self.row is not None and row.optimizer != self.row.optimizer and row.step <= self.row.step:
            return
        self.row = row
        certain = flags & _CERTAIN
        for i, value in enumerate(_GAUGE_VALUES(row)):
            if value == value or (certain and i < _OFTEN):  # noqa: PLR0124 - NaN: keep the last known value
                self.values[i] = value
        if row.step_seconds >= 0:  # not when unknown, which is NaN
            self.buckets[bisect_left(BUCKETS, row.step_seconds)] += 1
            self.step_seconds += row.step_seconds
        for i, seconds in enumerate(_PHASE_VALUES(row)):
            if seconds >= 0:
                self.phase_seconds[i] += seconds
                self.phase_counts[i] += 1

    def _count(self, flags: int) -> None:
        self.checked += bool(flags & _CHECKED)
        self.skipped += bool(flags & _SKIPPED)
        self.guarded += bool(flags & _GUARDED)
        self.unsynced += bool(flags & _UNSYNCED)
        if flags & _ANY_NONFINITE:
            for what, bit in NONFINITE.items():
                if flags & bit:
                    self.nonfinite[what] += 1


class Layers:
    """The layers that stand out in this rank's newest sample, in slots that they keep while they do."""

    def __init__(self) -> None:
        self._worst: dict[str, list[tuple[float, str]]] = {}
        self._named: dict[str, set[tuple[int, str]]] = {name: set() for name in _LAYERS}

    def take(self, detail: Mapping[str, Any]) -> None:
        """Take a detail of the kind `layers` (schema/details.py)."""
        weights = {name: about for name, about in _tables(detail.get("parameters")) if about.get("dim", 0) > 1}
        ratios = {name: _ratio(about.get("update"), about.get("norm")) for name, about in weights.items()}
        seen = dict(_tables(detail.get("modules")))
        values = {
            "ddpdebug_layer_update_ratio": ratios,
            "ddpdebug_layer_grad_norm": {name: about.get("grad_norm") for name, about in weights.items()},
            "ddpdebug_layer_dead_units": {name: about.get("zero_units") for name, about in seen.items()},
            "ddpdebug_layer_saturation": {name: about.get("saturated") for name, about in seen.items()},
        }
        found = {what: _seated(self._worst.get(what, ()), table) for what, table in values.items()}
        self._worst = {**self._worst, **{what: worst for what, worst in found.items() if worst}}

    def metrics(self, rank: str) -> Iterator[Metric]:
        """Yield a family of each kind, empty before the first sample."""
        for name, text in _LAYERS.items():
            slots = enumerate(self._worst.get(name, ()), 1)
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
    """Yield the run's identity, world size and budget; NaN before it has begun."""
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
    yield _gauge("ddpdebug_overhead_budget_ratio", "Share of the run's time that checks may cost.", [((own,), budget)])


def identity_of(started: RunStarted | None) -> dict[str, str]:
    """Return the labels of every series: the id of the run, and its name for people; none before it has begun."""
    return {} if started is None else {"run_id": started.run_id, "run": started.name or started.run_id}


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as the text format writes them."""
    escaped = {ord("\\"): r"\\", ord("\n"): r"\n", ord('"'): r"\""}
    return ",".join(f'{name}="{value.translate(escaped)}"' for name, value in sorted(labels.items()))


def state_metrics(own: str, state: RunState, end: End | None, seconds: float) -> Iterator[Metric]:
    """Yield the state of this process; once it has ended, what came of it and when (seconds since the epoch)."""
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
    own: str, outvoted: Mapping[str, Mapping[int, frozenset[int]]], disagreements: Mapping[str, int]
) -> Iterator[Metric]:
    """Yield how many ranks were outvoted last, and in how many steps any was; `outvoted` is by optimizer."""
    yield _gauge(
        "ddpdebug_ranks_disagreeing",
        "Ranks outvoted when this was last compared (all of them where there is no majority).",
        (((own, what), max(map(len, found.values()), default=0)) for what, found in outvoted.items()),
        "what",
    )
    yield _counter(
        "ddpdebug_disagreements",
        "Steps in which the ranks were compared and did not agree.",
        (((own, what), count) for what, count in disagreements.items()),
        "what",
    )


def own_metrics(
    own: str, errors: int, coverage: Coverage | None, last: StepJudged | None, now: float
) -> Iterator[Metric]:
    """Yield ddpdebug's own state: the time of this rendering, failures, coverage, overhead, check interval."""
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
    text = "Time spent in ddpdebug as a share of the time of a step, smoothed."
    yield _gauge("ddpdebug_overhead_ratio", text, [((own,), nan if last is None else last.overhead_ratio)])
    text = "The full check runs every so many steps."
    yield _gauge("ddpdebug_check_interval_steps", text, [((own,), nan if last is None else last.interval)])


def incident_metrics(own: str, incidents: Iterable[tuple[Finding, float]]) -> Iterator[Metric]:
    """Yield the newest findings by name: where each began, and when (seconds since the epoch)."""
    steps: list[tuple[Sequence[str], float]] = []
    times: list[tuple[Sequence[str], float]] = []
    for finding, seconds in incidents:
        subject = clean(finding.subject[0], 120) if finding.subject else ""
        culprits = ranks_text(finding.ranks).partition(" ")[2] if finding.ranks else ""
        where = clean(finding.location or "", 160)
        labels = (own, clean(finding.id, 80), finding.code, finding.severity.label, subject, culprits, where)
        steps.append((labels, float("nan") if finding.step is None else finding.step))
        times.append((labels, seconds))
    names = ("incident", "code", "severity", "subject", "culprits", "location")
    yield _gauge("ddpdebug_incident_step", f"First step of each of the {INCIDENTS} newest findings.", steps, *names)
    text = f"When each of the {INCIDENTS} newest findings was raised, in seconds since the epoch."
    yield _gauge("ddpdebug_incident_timestamp_seconds", text, times, *names)


class EachRank:
    """Makes the families of single ranks: one sample, or one for each further label, of each of them."""

    def shows(self, rank: str) -> bool:
        """Return whether the series of a rank are exported."""
        del rank
        return True

    def gauge(self, name: str, text: str, samples: _Samples, *labels: str, whole: bool = False) -> Iterator[Metric]:
        """Yield a gauge; `whole` is one that always has all ranks."""
        del whole
        yield _gauge(name, text, samples, *labels)

    def counter(self, name: str, text: str, samples: _Samples, *labels: str) -> Iterator[Metric]:
        """Yield a counter; its name is without `_total`."""
        yield _counter(name, text, samples, *labels)

    def more(self, ranks: _Ranks) -> Iterator[Metric]:
        """Yield what there is about all ranks together."""
        del ranks
        yield from ()


def rank_metrics(ranks: _Ranks, outvoted: Mapping[str, frozenset[int]], of: EachRank) -> Iterator[Metric]:
    """Yield the metrics of single ranks: place, rows, events, times, memory, votes."""
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
    yield from _row_metrics(ranks, of)
    yield from _event_metrics(ranks, of)
    yield from _time_metrics(ranks, of)
    yield from _memory_metrics(ranks, of)
    text = "1 while the rank was outvoted when this was last compared (all ranks where there is no majority)."
    votes = (((rank, what), int(rank) in outvoted[what]) for rank, _ in ranks for what in COMPARED)
    yield from of.gauge("ddpdebug_rank_outvoted", text, votes, "what")
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
    steps = HistogramMetricFamily("ddpdebug_step_seconds", "Time from step to step.", labels=("rank",))
    text = "Time of the phases of a step; data is the wait for the loader."
    phases = SummaryMetricFamily("ddpdebug_phase_seconds", text, labels=("rank", "phase"))
    for rank, state in ranks:
        if not of.shows(rank):
            continue
        totals = accumulate(tuple(state.buckets))
        steps.add_metric([rank], list(zip(BOUNDS, totals, strict=True)), state.step_seconds)
        for i, phase in enumerate(PHASES):
            phases.add_metric([rank, phase], state.phase_counts[i], state.phase_seconds[i])
    yield steps
    yield phases


def _memory_metrics(ranks: _Ranks, of: EachRank) -> Iterator[Metric]:
    known = [(rank, s.newest) for rank, s in ranks if s.newest is not None]
    for name, (field, text) in _MEMORY.items():
        yield from of.gauge(name, text, [((rank,), getattr(row, field)) for rank, row in known])
    text = "Memory of the device, as torch's allocator counts it."
    values = (((rank, kind), getattr(row, field)) for rank, row in known for kind, field in _DEVICE_MEMORY.items())
    yield from of.gauge("ddpdebug_device_memory_bytes", text, values, "kind")
