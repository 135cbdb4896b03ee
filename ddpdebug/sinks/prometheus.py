"""Serves the state of the run to Prometheus. Torch-free; imports prometheus_client, so import it where it is used.

A step costs storing references and one histogram increment: everything else happens when somebody scrapes, in a thread
of the server's own, also while the training thread hangs in a collective. Training code is never called from there.

Labels are `rank` (who reports) and few fixed values, so that the number of series does not depend on the model. What
all ranks know alike (findings, disagreement, interval) is reported by every rank that serves: aggregate with `max`, not
with `sum`. With several optimizers, loss, norms, rates and times are those of the one that has stepped most, the first
of equals.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ddpdebug.findings import Severity
from ddpdebug.observations import Flag, Row
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, StepJudged, Trouble
from ddpdebug.sinks.agreement import COMPARED, disagreeing

#: Upper bounds of the step-time histogram, seconds.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASES = ("data", "forward", "backward", "optimizer")
_TRIES = 100

_ROW_GAUGES = {
    "loss": "Mean loss of the last step, unscaled, as given to backward.",
    "grad_norm": "2-norm of the gradients after the reduction, before clipping.",
    "local_grad_norm": "2-norm of the rank's own gradients before the reduction.",
    "loss_scale": "Scale of the gradient scaler.",
    "learning_rate": "Learning rate of the first parameter group.",
}
_ROW_FIELD = {"learning_rate": "lr"}
#: In such a step NaN is a value or says that there is none.
_CERTAIN = Flag.CHECKED | Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE
#: Why a step was skipped -> what says so.
_SKIPPED = {"guard": Flag.GUARD_SKIPPED, "scaler": Flag.SKIPPED}
_DEVICE_MEMORY = {
    "allocated": "device_allocated_bytes",
    "reserved": "device_reserved_bytes",
    "peak": "device_peak_bytes",
}


class _RankState:
    """What is known of one rank."""

    def __init__(self) -> None:
        self.row: Row | None = None  # of the optimizer that is followed
        self.newest: Row | None = None  # of any optimizer
        self.seen = 0.0
        self.values = dict.fromkeys(_ROW_GAUGES, float("nan"))
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.step_seconds = 0.0
        self.skipped = dict.fromkeys(_SKIPPED, 0)
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.phase_counts = dict.fromkeys(PHASES, 0)

    def add(self, row: Row, now: float) -> None:
        self.newest, self.seen = row, now
        for reason, flag in _SKIPPED.items():
            self.skipped[reason] += row.has(flag)
        if self.row is not None and row.optimizer != self.row.optimizer and row.step <= self.row.step:
            return
        self.row = row
        certain = bool(row.flags & _CERTAIN)
        for name in _ROW_GAUGES:
            value = getattr(row, _ROW_FIELD.get(name, name))
            if certain or not math.isnan(value):  # otherwise not computed in this step: keep the last known value
                self.values[name] = value
        if row.step_seconds >= 0:  # not when unknown, which is NaN
            self.buckets[bisect_left(BUCKETS, row.step_seconds)] += 1
            self.step_seconds += row.step_seconds
        for phase in PHASES:
            seconds = getattr(row, f"{phase}_seconds")
            if seconds >= 0:
                self.phase_seconds[phase] += seconds
                self.phase_counts[phase] += 1


class PrometheusSink(Collector):
    """A sink that is scraped. It serves from its construction on; `url` says where, None where it does not serve.

    A port that is taken moves on to the next one. When there is none, or the host is not ours, the first `write` raises
    that OSError, so that the fan-out reports it.

    Args:
        port: of local rank 0; 0 takes any free port.
        mode: `per-rank` (each rank serves its own series) or `rank0` (rank 0 serves those of all ranks).
        codes: the findings that can be raised, so that their counters exist before the first one.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        *,
        mode: str = "per-rank",
        local_rank: int = 0,
        codes: Mapping[str, Severity] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = rank
        self._everyone = mode == "rank0"
        self._clock = clock
        self._ranks: dict[int, _RankState] = {rank: _RankState()}
        self._findings = Counter({(code, severity.label): 0 for code, severity in (codes or {}).items()})
        self._disagreeing: dict[str, dict[int, int]] = {what: {} for what in COMPARED}
        self._errors = 0
        self._last: StepJudged | None = None
        self._started: RunStarted | None = None
        self._failure: OSError | None = None
        self._stop: Callable[[], None] | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.url: str | None = None
        if rank == 0 or not self._everyone:
            try:
                self._serve(host, port + local_rank if port and not self._everyone else port)
            except OSError as error:
                self._failure = error

    def write(self, record: Record) -> None:
        """Remember the record for the next scrape."""
        if self._failure is not None:
            raise self._failure
        match record:
            case StepJudged():
                self._step(record)
            case FindingRaised() if record.new:
                self._findings[record.finding.code, record.finding.severity.label] += 1
            case Trouble():
                self._errors += 1
            case RunStarted():
                self._started = record
            case RunEnded():
                self.close()

    def close(self) -> None:
        """Stop serving: at once as a rule, within half a second at worst."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _step(self, record: StepJudged) -> None:
        self._last = record
        now = self._clock()
        for rank, row in record.step.rows.items():
            if rank == self._rank or self._everyone:
                self._ranks.setdefault(rank, _RankState()).add(row, now)
        for what, count in disagreeing(record.step).items():
            self._disagreeing[what][record.step.optimizer] = count

    def _serve(self, host: str, port: int) -> None:
        for tried in range(port, min(port + _TRIES, 65536)):
            try:
                server, thread = start_http_server(tried, addr=host, registry=self.registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue

            self._stop = partial(_stop_server, server, thread, host, os.getpid())
            name = f"[{host}]" if ":" in host else host
            self.url = f"http://{name}:{server.server_port}/metrics"
            return
        raise OSError(errno.EADDRINUSE, f"no free port from {port} to {port + _TRIES - 1} on {host!r} for metrics")

    # -- scraping

    def describe(self) -> list[Metric]:
        """Return nothing: what is served is only known when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the current values."""
        yield from self._run_metrics()
        yield from self._shared_metrics()
        ranks = [(str(rank), state) for rank, state in sorted(self._ranks.copy().items())]
        yield from _row_metrics(ranks)
        yield from _time_metrics(ranks)
        yield from _memory_metrics(ranks)
        yield _skip_metric(ranks)

    def _run_metrics(self) -> Iterator[Metric]:
        text = "The run that is watched; always 1."
        run = GaugeMetricFamily("ddpdebug_run_info", text, labels=("run_id", "world_size", "torch", "ddpdebug"))
        text = "Where the rank that reports runs; always 1."
        place = GaugeMetricFamily("ddpdebug_rank_info", text, labels=("rank", "local_rank", "node"))
        if (started := self._started) is not None:
            versions = started.versions
            run.add_metric(
                [started.run_id, str(started.world), versions.get("torch", ""), versions.get("ddpdebug", "")], 1
            )
            place.add_metric([str(started.rank), str(started.local_rank), started.node], 1)
        yield run
        yield place

    def _shared_metrics(self) -> Iterator[Metric]:
        own = str(self._rank)
        text = "Findings raised, each once however often it occurs."
        findings = CounterMetricFamily("ddpdebug_findings", text, labels=("rank", "code", "severity"))
        for (code, severity), count in sorted(self._findings.copy().items()):
            findings.add_metric([own, code, severity], count)
        yield findings
        text = "Ranks outvoted when this was last compared (all of them where there is no majority)."
        outvoted = GaugeMetricFamily("ddpdebug_ranks_disagreeing", text, labels=("rank", "what"))
        for what, counts in self._disagreeing.items():
            outvoted.add_metric([own, what], max(counts.copy().values(), default=0))
        yield outvoted
        text = "Parts of ddpdebug that failed and switched themselves off."
        errors = CounterMetricFamily("ddpdebug_internal_errors", text, labels=("rank",))
        errors.add_metric([own], self._errors)
        yield errors
        last = self._last
        text = "Time spent in ddpdebug as a share of the time of a step, smoothed."
        yield _gauge("ddpdebug_overhead_ratio", text, own, float("nan") if last is None else last.overhead_ratio)
        text = "The full check runs every so many steps."
        yield _gauge("ddpdebug_check_interval_steps", text, own, float("nan") if last is None else last.interval)


def _stop_server(server: WSGIServer, thread: threading.Thread, host: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has no server thread to wait for
    stopper = threading.Thread(target=server.shutdown, daemon=True)
    stopper.start()
    with suppress(OSError):  # the server looks up twice a second, or when somebody knocks
        socket.create_connection((host, server.server_port), timeout=0.5).close()
    stopper.join(1.0)
    server.server_close()
    thread.join(1.0)


_Ranks = list[tuple[str, _RankState]]


def _gauge(name: str, text: str, rank: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("rank",))
    family.add_metric([rank], value)
    return family


def _row_metrics(ranks: _Ranks) -> Iterator[Metric]:
    step = GaugeMetricFamily("ddpdebug_step", "Last optimizer step, counted from 0.", labels=("rank",))
    text = "When the rank's last step was seen, in seconds since the epoch."
    seen = GaugeMetricFamily("ddpdebug_last_step_timestamp_seconds", text, labels=("rank",))
    for rank, state in ranks:
        if (row := state.row) is not None:
            step.add_metric([rank], row.step)
            seen.add_metric([rank], state.seen)
    yield step
    yield seen
    for name, text in _ROW_GAUGES.items():
        family = GaugeMetricFamily(f"ddpdebug_{name}", f"{text} NaN where unknown.", labels=("rank",))
        for rank, state in ranks:
            family.add_metric([rank], state.values[name])
        yield family


def _time_metrics(ranks: _Ranks) -> Iterator[Metric]:
    steps = HistogramMetricFamily("ddpdebug_step_seconds", "Time from step to step.", labels=("rank",))
    text = "Time of the phases of a step; data is the wait for the loader."
    phases = SummaryMetricFamily("ddpdebug_phase_seconds", text, labels=("rank", "phase"))
    for rank, state in ranks:
        total, buckets = 0, []
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], tuple(state.buckets), strict=True):
            total += count
            buckets.append((bound, total))
        steps.add_metric([rank], buckets, state.step_seconds)
        for phase in PHASES:
            phases.add_metric([rank, phase], state.phase_counts[phase], state.phase_seconds[phase])
    yield steps
    yield phases


def _skip_metric(ranks: _Ranks) -> Metric:
    text = "Optimizer steps that did not happen: skipped by the numeric guard or by the gradient scaler."
    skipped = CounterMetricFamily("ddpdebug_skipped_steps", text, labels=("rank", "reason"))
    for rank, state in ranks:
        for reason, count in state.skipped.items():
            skipped.add_metric([rank, reason], count)
    return skipped


def _memory_metrics(ranks: _Ranks) -> Iterator[Metric]:
    host = GaugeMetricFamily("ddpdebug_host_memory_bytes", "Resident memory of the process.", labels=("rank",))
    text = "Memory of the device, as torch's allocator counts it."
    device = GaugeMetricFamily("ddpdebug_device_memory_bytes", text, labels=("rank", "kind"))
    for rank, state in ranks:
        if (row := state.newest) is not None:
            host.add_metric([rank], row.host_bytes)
            for kind, field in _DEVICE_MEMORY.items():
                device.add_metric([rank, kind], getattr(row, field))
    yield host
    yield device
