"""Serves the state of the run to Prometheus. Torch-free; imports prometheus_client, so import it where it is used.

A step costs storing references and counting: everything else happens when somebody scrapes, in a thread of the
server's own, also while the training thread hangs in a collective. Training code is never called from there.

Labels are `rank` (who reports) and few fixed values, so that the number of series does not depend on the model: at most
150 per rank, 98 of them without any finding, then up to ten for the newest and one for each code.
What all ranks know alike (findings, disagreement, interval) is reported by every rank that serves: aggregate it with
`max`, not with `sum`.
With several optimizers, loss, norms, rates and times are those of the one that has stepped most, the first of equals.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddpdebug.schema.coverage import Coverage, counted_off
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks import Covered, FindingRaised, Record, RunEnded, RunStarted, Saved, StepJudged, Trouble
from ddpdebug.sinks.agreement import COMPARED, dissenters
from ddpdebug.sinks.prometheus.connections import App
from ddpdebug.sinks.prometheus.discovery import target
from ddpdebug.sinks.prometheus.endpoint import Endpoint, Serving, json_app
from ddpdebug.sinks.prometheus.families import rank_metrics
from ddpdebug.sinks.prometheus.frugal import SHARE, SHARE_OF_ALL, Frugal
from ddpdebug.sinks.prometheus.layers import Layers
from ddpdebug.sinks.prometheus.state import RankState
from ddpdebug.sinks.text import clean, ranks_text

#: So many of the newest findings are shown with their names.
INCIDENTS = 5
#: So many codes are counted apart, further ones together as `other`.
_CODES = 35


class PrometheusSink(Collector):
    """A sink that is scraped. It serves from its construction on; `url` says where, None where it does not serve.

    A port that is taken moves on to the next one. When there is none, or the host is not ours, the first `write` raises
    that OSError, so that the fan-out reports it.

    Args:
        port: of local rank 0; 0 takes any free port.
        mode: `per-rank` (each rank serves its own series) or `rank0` (rank 0 serves those of all ranks).
        serving: TLS, passwords and the like.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        *,
        mode: str = "per-rank",
        local_rank: int = 0,
        clock: Callable[[], float] = time.time,
        serving: Serving | None = None,
    ) -> None:
        self._rank = rank
        self._everyone = mode == "rank0"
        self._clock = clock
        self._ranks: dict[int, RankState] = {rank: RankState()}
        # a zero of each severity, so that sums exist before the first finding; an empty label is one that is not there
        self._findings = Counter({("", severity.label): 0 for severity in Severity})
        self._incidents: deque[tuple[Finding, float]] = deque(maxlen=INCIDENTS)
        self._outvoted: dict[str, dict[int, frozenset[int]]] = {what: {} for what in COMPARED}
        self._disagreements = dict.fromkeys(COMPARED, 0)
        self._layers = Layers()
        self._errors = 0
        self._coverage: Coverage | None = None
        self._last: StepJudged | None = None
        self._started: RunStarted | None = None
        self._targets: dict[int, str] = {}
        self._failure: OSError | None = None
        self._endpoint: Endpoint | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.url: str | None = None
        if rank == 0 or not self._everyone:
            share = SHARE_OF_ALL if self._everyone else SHARE
            apps: dict[str, App] = {"/metrics": Frugal(make_wsgi_app(self.registry), share)}
            if rank == 0:
                apps["/sd"] = json_app(self._sd)
            try:
                first = port + local_rank if port and not self._everyone else port
                self._endpoint = served = Endpoint(apps, host, first, serving or Serving())
                self.url = f"{served.scheme}://{served.address}/metrics"
            except OSError as error:
                self._failure = error

    def write(self, record: Record) -> None:
        """Remember the record for the next scrape."""
        if self._failure is not None:
            raise self._failure
        match record:
            case StepJudged():
                self._step(record)
            case FindingRaised():
                self._finding(record)
            case Trouble():
                self._errors += 1
            case Covered():
                self._coverage = record.coverage
            case Saved(kind="fact", payload={"topic": "place", "rank": int(rank), "value": dict(place)}):
                self._place(rank, place)
            case Saved(kind="detail", payload={"detail": "layers", "rank": self._rank, "value": dict(detail)}):
                self._layers.take(detail)
            case RunStarted():
                self._started = record
                own = {"node": record.node, "local_rank": record.local_rank, "metrics": record.metrics_url}
                self._place(record.rank, own)
            case RunEnded():
                self.close()

    def close(self) -> None:
        """Stop serving."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _step(self, record: StepJudged) -> None:
        self._last = record
        now = self._clock()
        step = record.step
        if self._everyone:
            for rank, row in step.rows.items():
                if (state := self._ranks.get(rank)) is None:
                    state = self._ranks[rank] = RankState()
                state.add(row, now)
            for rank, state in self._ranks.items():
                state.up = rank in step.rows
        elif (own := step.rows.get(self._rank)) is not None:
            self._ranks[self._rank].add(own, now)
        for what, ranks in dissenters(step).items():
            self._outvoted[what][step.optimizer] = ranks
            self._disagreements[what] += bool(ranks)

    def _finding(self, record: FindingRaised) -> None:
        finding = record.finding
        if record.new:
            known = finding.code in {code for code, _ in self._findings} or len(self._findings) < _CODES + len(Severity)
            self._findings[finding.code if known else "other", finding.severity.label] += 1
            self._incidents.append((finding, self._clock()))

    def _place(self, rank: int, place: Mapping[str, Any]) -> None:
        if isinstance(url := place.get("metrics"), str):
            self._targets[rank] = url
        if rank == self._rank or self._everyone:
            state = self._ranks.setdefault(rank, RankState())
            state.node = clean(place.get("node", state.node), 200)
            state.local_rank = clean(place.get("local_rank", state.local_rank), 20)
            state.gpu = clean(place.get("gpu_uuid", state.gpu), 100)

    def _sd(self) -> list[dict[str, object]]:
        """Return the targets of the job, for Prometheus's HTTP service discovery."""
        run_id = "" if self._started is None else self._started.run_id
        found = []
        for _, url in sorted(self._targets.copy().items()):
            scheme, _, rest = url.partition("://")
            found.append(target(rest.partition("/")[0], run_id, scheme))
        return found

    # -- scraping

    def describe(self) -> list[Metric]:
        """Return nothing: what is served is only known when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the current values."""
        yield from self._run_metrics()
        yield from self._shared_metrics()
        yield from self._incident_metrics()
        ranks = [(str(rank), state) for rank, state in sorted(self._ranks.copy().items())]
        outvoted = {what: frozenset().union(*found.copy().values()) for what, found in self._outvoted.items()}
        yield from rank_metrics(ranks, outvoted)
        yield from self._layers.metrics(str(self._rank))

    def _run_metrics(self) -> Iterator[Metric]:
        text = "The run that is watched; always 1."
        run = GaugeMetricFamily("ddpdebug_run_info", text, labels=("run_id", "world_size", "torch", "ddpdebug"))
        own, world, budget = str(self._rank), float("nan"), float("nan")
        if (started := self._started) is not None:
            world = started.world
            budget = float(started.config.get("budget", budget))
            found = started.versions
            run.add_metric([started.run_id, str(world), found.get("torch", ""), found.get("ddpdebug", "")], 1)
        yield run
        yield _gauge("ddpdebug_world_size", "Ranks that the run was started with.", own, world)
        yield _gauge("ddpdebug_overhead_budget_ratio", "Share of the run's time that checks may cost.", own, budget)

    def _shared_metrics(self) -> Iterator[Metric]:
        own = str(self._rank)
        text = "Findings raised, each once however often it occurs; without a code, a zero of each severity."
        findings = CounterMetricFamily("ddpdebug_findings", text, labels=("rank", "code", "severity"))
        for (code, severity), count in sorted(self._findings.copy().items()):
            findings.add_metric([own, code, severity], count)
        yield findings
        text = "Ranks outvoted when this was last compared (all of them where there is no majority)."
        outvoted = GaugeMetricFamily("ddpdebug_ranks_disagreeing", text, labels=("rank", "what"))
        for what, found in self._outvoted.items():
            outvoted.add_metric([own, what], max(map(len, found.copy().values()), default=0))
        yield outvoted
        text = "Steps in which the ranks were compared and did not agree."
        steps = CounterMetricFamily("ddpdebug_disagreements", text, labels=("rank", "what"))
        for what, count in self._disagreements.items():
            steps.add_metric([own, what], count)
        yield steps
        text = "Parts of ddpdebug that failed and switched themselves off."
        errors = CounterMetricFamily("ddpdebug_internal_errors", text, labels=("rank",))
        errors.add_metric([own], self._errors)
        yield errors
        yield from self._coverage_metrics(own)
        last = self._last
        text = "Time spent in ddpdebug as a share of the time of a step, smoothed."
        yield _gauge("ddpdebug_overhead_ratio", text, own, float("nan") if last is None else last.overhead_ratio)
        text = "The full check runs every so many steps."
        yield _gauge("ddpdebug_check_interval_steps", text, own, float("nan") if last is None else last.interval)

    def _coverage_metrics(self, own: str) -> Iterator[Metric]:
        known = self._coverage
        complete = None if known is None else known.complete
        text = "1 while everything is checked that normally is, 0 while something is not, NaN until that is certain."
        yield _gauge("ddpdebug_coverage_complete", text, own, float("nan") if complete is None else complete)
        text = "Ranks that are compared with each other: 0 while none are, 1 in a world of one."
        yield _gauge("ddpdebug_ranks_compared", text, own, 0 if known is None else known.compared_now)
        text = "Things that are not checked, by what they are about; absent where there are none."
        off = GaugeMetricFamily("ddpdebug_checks_off", text, labels=("rank", "part"))
        for part, count in sorted(counted_off(known).items() if known is not None and complete is False else ()):
            off.add_metric([own, part], count)
        yield off

    def _incident_metrics(self) -> Iterator[Metric]:
        labels = ("rank", "incident", "code", "severity", "subject", "culprits")
        text = f"First step of each of the {INCIDENTS} newest findings."
        step = GaugeMetricFamily("ddpdebug_incident_step", text, labels=labels)
        text = f"When each of the {INCIDENTS} newest findings was raised, in seconds since the epoch."
        when = GaugeMetricFamily("ddpdebug_incident_timestamp_seconds", text, labels=labels)
        for finding, seconds in tuple(self._incidents):
            subject = clean(finding.subject[0], 120) if finding.subject else ""
            culprits = ranks_text(finding.ranks).partition(" ")[2] if finding.ranks else ""
            values = [str(self._rank), clean(finding.id, 80), finding.code, finding.severity.label, subject, culprits]
            step.add_metric(values, float("nan") if finding.step is None else finding.step)
            when.add_metric(values, seconds)
        yield step
        yield when


def _gauge(name: str, text: str, rank: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("rank",))
    family.add_metric([rank], value)
    return family
