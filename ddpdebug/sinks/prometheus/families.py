"""The metrics of the ranks as Prometheus reads them: names, types, help texts. Called while somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from ddpdebug.sinks.agreement import COMPARED
from ddpdebug.sinks.prometheus.state import BUCKETS, DEVICE_MEMORY, GAUGES, MEMORY, NONFINITE, PHASES, RankState

#: Ranks as labels, with what is known of them.
Ranks = Sequence[tuple[str, RankState]]

_BOUNDS = (*map(str, BUCKETS), "+Inf")
_RANK = ("rank",)


def rank_metrics(ranks: Ranks, outvoted: Mapping[str, frozenset[int]]) -> Iterator[Metric]:
    """Return everything that is known rank by rank."""
    yield _place(ranks)
    text = "1 while the rank takes part in the steps; 0 once it has left."
    yield _family(GaugeMetricFamily("ddpdebug_rank_up", text, labels=_RANK), ranks, lambda s: float(s.up))
    yield from _row_metrics(ranks)
    yield from _event_metrics(ranks)
    yield from _time_metrics(ranks)
    yield from _memory_metrics(ranks)
    text = "1 while the rank was outvoted when this was last compared (all ranks where there is no majority)."
    votes = GaugeMetricFamily("ddpdebug_rank_outvoted", text, labels=("rank", "what"))
    for rank, _ in ranks:
        for what in COMPARED:
            votes.add_metric([rank, what], int(rank) in outvoted[what])
    yield votes


def _place(ranks: Ranks) -> Metric:
    text = "Where the rank runs; always 1. gpu_uuid is empty without a GPU."
    place = GaugeMetricFamily("ddpdebug_rank_info", text, labels=("rank", "local_rank", "node", "gpu_uuid"))
    for rank, state in ranks:
        if state.local_rank:
            place.add_metric([rank, state.local_rank, state.node, state.gpu], 1)
    return place


def _family(family: Metric, ranks: Ranks, value: Callable[[RankState], float]) -> Metric:
    for rank, state in ranks:
        family.add_metric([rank], value(state))  # type: ignore[attr-defined]  # of every family used here
    return family


def _row_metrics(ranks: Ranks) -> Iterator[Metric]:
    step = GaugeMetricFamily("ddpdebug_step", "Last optimizer step, counted from 0.", labels=_RANK)
    text = "When the rank's last step was seen, in seconds since the epoch."
    seen = GaugeMetricFamily("ddpdebug_last_step_timestamp_seconds", text, labels=_RANK)
    text = "Trainable parameters that had no gradient in the last step."
    bare = GaugeMetricFamily("ddpdebug_parameters_without_gradient", text, labels=_RANK)
    for rank, state in ranks:
        if (row := state.row) is not None:
            step.add_metric([rank], row.step)
            seen.add_metric([rank], state.seen)
            bare.add_metric([rank], row.without_grad)
    yield step
    yield seen
    yield bare
    for i, (name, (_, text)) in enumerate(GAUGES.items()):
        family = GaugeMetricFamily(f"ddpdebug_{name}", f"{text} NaN where unknown.", labels=_RANK)
        yield _family(family, ranks, lambda state, i=i: state.values[i])  # type: ignore[misc]  # a default argument


def _event_metrics(ranks: Ranks) -> Iterator[Metric]:
    """Yield counters of steps; all exist before the first event."""

    def counter(name: str, text: str, value: Callable[[RankState], float]) -> Metric:
        return _family(CounterMetricFamily(f"ddpdebug_{name}", text, labels=_RANK), ranks, value)

    yield counter("steps", "Optimizer steps seen, of all optimizers.", lambda s: s.steps)
    yield counter("checked_steps", "Steps in which the full check ran.", lambda s: s.checked)
    yield counter("skipped_steps", "Steps that the gradient scaler did not take.", lambda s: s.skipped)
    yield counter(
        "guard_skipped_steps", "Steps that the numeric guard kept all ranks from taking.", lambda s: s.guarded
    )
    yield counter("clipped_steps", "Steps whose gradients were clipped.", lambda s: s.clipped)
    text = "Steps into which gradients went that no DDP had reduced."
    yield counter("unsynchronised_steps", text, lambda s: s.unsynced)
    text = "Steps in which this was NaN or infinite on the rank."
    family = CounterMetricFamily("ddpdebug_nonfinite_steps", text, labels=("rank", "what"))
    for rank, state in ranks:
        for what in NONFINITE:
            family.add_metric([rank, what], state.nonfinite[what])
    yield family


def _time_metrics(ranks: Ranks) -> Iterator[Metric]:
    steps = HistogramMetricFamily("ddpdebug_step_seconds", "Time from step to step.", labels=_RANK)
    text = "Time of the phases of a step; data is the wait for the loader."
    phases = SummaryMetricFamily("ddpdebug_phase_seconds", text, labels=("rank", "phase"))
    for rank, state in ranks:
        total, buckets = 0, []
        for bound, count in zip(_BOUNDS, tuple(state.buckets), strict=True):
            total += count
            buckets.append((bound, total))
        steps.add_metric([rank], buckets, state.step_seconds)
        for i, phase in enumerate(PHASES):
            phases.add_metric([rank, phase], state.phase_counts[i], state.phase_seconds[i])
    yield steps
    yield phases


def _memory_metrics(ranks: Ranks) -> Iterator[Metric]:
    for name, (field, text) in MEMORY.items():
        family = GaugeMetricFamily(f"ddpdebug_{name}", text, labels=_RANK)
        for rank, state in ranks:
            if (row := state.newest) is not None:
                family.add_metric([rank], getattr(row, field))
        yield family
    text = "Memory of the device, as torch's allocator counts it."
    device = GaugeMetricFamily("ddpdebug_device_memory_bytes", text, labels=("rank", "kind"))
    for rank, state in ranks:
        if (row := state.newest) is not None:
            for kind, field in DEVICE_MEMORY.items():
                device.add_metric([rank, kind], getattr(row, field))
    yield device
