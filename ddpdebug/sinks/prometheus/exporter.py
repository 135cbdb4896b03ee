"""The Prometheus exporter: the sink that is scraped. Torch-free; imports prometheus_client, so import it on use only.

A step costs storing references and counting: everything else happens when somebody scrapes, in a thread of the
server's own, also while the training thread hangs in a collective. Training code is never called from there.

Every series carries `run_id` and `run`, of which a process has one value each: a new run is a new series, also on the
port of an old one. Other labels are `rank` (who reports) and few fixed values, so that the number of series does not
depend on the model (`SERIES` at most), nor, where one rank speaks for all, on a large world.
What all ranks know alike is aggregated with `max`, not with `sum`. Findings, incidents and disagreement are many
series: only the lowest and the highest rank that take part report them, and all do when they can no longer talk. Two,
so that they are not lost with one endpoint or one node.
With several optimizers, loss, norms, rates and times are those of the one that has stepped most, the first of equals.
"""

from __future__ import annotations

import math
import socket
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ddpdebug.clock import time
from ddpdebug.schema import pace
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.run_state import End, RunState, WaitState, end_of
from ddpdebug.schema.step import Step
from ddpdebug.sinks import (
    Covered,
    FindingRaised,
    Met,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    StepJudged,
    Trouble,
    Waiting,
)
from ddpdebug.sinks.agreement import COMPARED, dissenters
from ddpdebug.sinks.prometheus.discovery import target
from ddpdebug.sinks.prometheus.exposition import OPENMETRICS, TEXT, openmetrics_of, text_of, wants_openmetrics
from ddpdebug.sinks.prometheus.listening import Serving
from ddpdebug.sinks.prometheus.many import EVERY_RANK, ManyRanks, Recent, Shown
from ddpdebug.sinks.prometheus.metrics import (
    INCIDENTS,
    LASTING,
    NONFINITE,
    EachRank,
    Layers,
    Pace,
    RankState,
    agreement_metrics,
    finding_metrics,
    hang_metrics,
    identity_of,
    incident_metrics,
    is_about_making,
    own_metrics,
    rank_metrics,
    run_metrics,
    state_metrics,
)
from ddpdebug.sinks.prometheus.server import SHARE, SHARE_OF_ALL, App, Endpoint, Form, Page, json_app
from ddpdebug.sinks.text import ENDED
from ddpdebug.sinks.words import clean

#: Series of a rank at most, a GPU's included: before it has found anything, and with everything found.
SERIES, SERIES_WITH_FINDINGS = 118, 173
#: Series at most where one rank speaks for so many that it shows aggregates and a few of them; one for each rank more.
SERIES_OF_ALL = 2500
#: So many codes are counted apart, further ones together as `other`.
_CODES = 35
#: A finding that did not show again in so many steps is not current any more.
_RECENT = 1000
#: What the codes begin with of what ranks announce once (`detectors/kinds.py`, `EventRule`), whose findings are never
#: over; a test compares them with the rules, which a rank does not load.
TOLD_ONCE = (
    *("FAIL", "HANG", "MEM401", "DATA903", "DATA907", "DATA911"),
    *("RCP801", "RCP802", "RCP803", "RCP805", "RCP806", "RCP810", "RCP811", "RCP812", "RCP817", "RCP819", "RCP82"),
)
#: So many different kinds of ranks are kept, and for so many seconds, before they are counted for each rank.
_MOST_KINDS, _COUNT_SECONDS = 16, 5.0
#: Scrapes of one moment are one: they lie so many seconds apart otherwise.
APART = 0.5
#: Seconds for which ranks are believed that have said who takes part, or who waits; they say it every few seconds.
_BELIEVED = 30.0
#: A rank that has others says every few seconds who takes part: after so many seconds without it is silent.
_SILENT = 60.0


class PrometheusSink(Collector):
    """The exporter of one rank, with an HTTP endpoint of its own.

    Args:
        mode: `per-rank` (each rank serves its own series) or `rank0` (rank 0 serves those of all ranks; of more than
            `EVERY_RANK` of them aggregates and a few, all with `?detail=all`).
        serving: TLS, passwords and the like.
    """

    def __init__(
        self,
        rank: int,
        host: str = "127.0.0.1",
        *,
        mode: str = "per-rank",
        clock: Callable[[], float] = time.time,
        serving: Serving | None = None,
    ) -> None:
        self._rank, self._host, self._serving = rank, host, serving or Serving()
        self._everyone = mode == "rank0"
        self._clock = clock
        self._ranks: dict[int, RankState] = {rank: RankState()}
        # a zero of each severity, so that sums exist before the first finding; an empty label is one that is not there
        self._findings = Counter({("", severity.label): 0 for severity in Severity})
        self._incidents: deque[tuple[Finding, float]] = deque(maxlen=INCIDENTS)
        self._grave: dict[str, Finding] = {}  # at error or above: code -> the one that was seen last
        self._end: End | None = None
        self._ended = 0.0
        #: How often the end was scraped, in moments apart, and when last.
        self.scrapes, self.scraped = 0, -math.inf
        self._pages: list[Page] = []
        self._outvoted: dict[str, dict[int, frozenset[int]]] = {what: {} for what in COMPARED}
        self._disagreements = dict.fromkeys(COMPARED, 0)
        self._layers = Layers()
        self._pace = Pace()
        self._members: tuple[int, ...] = ()
        self._met, self._apart = -math.inf, 0
        self._waiting, self._waited = Waiting(), -math.inf  # and when it was told
        self._nodes: dict[int, str] = {}
        self._peers: dict[str, set[int]] = {}  # node -> its ranks
        self._origin: tuple[tuple[float, int], frozenset[int]] | None = None  # (step, number of ranks), ranks
        self._errors = 0
        self._coverage: Coverage | None = None
        self._last: StepJudged | None = None
        self._started: RunStarted | None = None
        self._targets: dict[int, str] = {}
        self._endpoint: Endpoint | None = None
        self._recent, self._shown = Recent(), Shown()
        # of steps with chosen rows: what whole kinds of ranks have in common, until it is counted for each of them
        self._kinds, self._counted = Counter[tuple[frozenset[int], int, bool]](), 0.0
        self.url = ""
        self._apps: dict[str, App] = {"/metrics": self._page(SHARE_OF_ALL if self._everyone else SHARE)}
        if rank == 0:
            self._apps["/sd"] = json_app(self._sd)

    def serve(self, listener: socket.socket | None = None) -> str:
        """Serve on a socket, or on any free port; return the address.

        Raises:
            OSError: the host is not ours, or a file of `serving` cannot be used.
        """
        self._endpoint = served = Endpoint(self._apps, self._host, 0, self._serving, listener=listener)
        self.url = f"{served.scheme}://{served.address}/metrics"
        return served.address

    def move(self) -> str:
        """Serve on another port; return the new address."""
        self.close()
        return self.serve()

    def write(self, record: Record) -> None:
        """Keep the record for the next scrape."""
        match record:
            case StepJudged():
                self._step(record)
            case Met() | Waiting():
                self._meeting(record)
            case FindingRaised():
                self._finding(record)
            case Trouble():
                self._errors += 1
            case Covered():
                self._coverage = record.coverage
            case Saved():
                self._saved(record)
            case RunStarted():
                self._started = record
                own = {"node": record.node, "local_rank": record.local_rank, "metrics": record.metrics_url}
                self._place(record.rank, own)
            case RunEnded():
                self.end(end_of(record.reason, record.exit_code, gravest=self.gravest))
                self.close()

    def close(self) -> None:
        """Stop serving."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def end(self, end: End) -> None:
        """Record the end of the rank: from now on only lasting metrics are served."""
        self._end, self._ended = end, self._clock()
        for page in self._pages:
            page.forget()

    def _saved(self, record: Saved) -> None:
        match record:
            case Saved(kind="fact", payload={"topic": "place", "rank": int(rank), "value": dict(place)}):
                for one in record.payload.get("ranks", (rank,)):
                    self._place(one, place)
            case Saved(kind="detail", payload={"detail": "layers", "rank": self._rank, "value": dict(detail), **rest}):
                self._layers.take(detail, int(rest.get("step") or 0), self._interval)

    def _meeting(self, record: Met | Waiting) -> None:
        """Take who takes part, or who waits for whom: true for a while."""
        if isinstance(record, Met):
            self._members, self._apart, self._met = record.members, record.apart, self._clock()
        else:
            self._waiting, self._waited = record, self._clock()

    def _step(self, record: StepJudged) -> None:
        self._last = record
        now = self._clock()
        step = record.step
        self._pace.learn(step)
        costs = pace.costs(pace.own_times(step))
        if self._everyone:
            there = {self._nodes.get(rank, "") for rank in step.rows}
            used = {node: self._used(step, ranks) for node, ranks in self._peers.items() if node in there}
            for rank, row in step.rows.items():
                if (state := self._ranks.get(rank)) is None:
                    state = self._ranks[rank] = RankState()
                host, cost = used.get(self._nodes.get(rank, ""), 0), costs.get(rank, 0.0)
                # of each kind the lowest rank is chosen in any case, and the others because they are first in something
                how = {"events": not step.kinds, "times": not step.chosen or rank in step.kinds}
                state.add(row, now, self._pace.bounds, host_bytes=host, cost=cost, **how)
                state.steps += record.steps - 1
            self._count_kinds(step, now)
            everyone = step.everyone
            for rank, state in self._ranks.items():
                state.up = rank in everyone
        elif (own := step.rows.get(self._rank)) is not None:
            peers = self._peers.get(self._nodes.get(self._rank, ""), {self._rank})
            host, cost = self._used(step, peers), costs.get(self._rank, 0.0)
            self._ranks[self._rank].add(own, now, self._pace.bounds, host_bytes=host, cost=cost)
            self._ranks[self._rank].steps += record.steps - 1
        for what, ranks in dissenters(step).items():
            self._outvoted[what][step.optimizer] = ranks
            self._disagreements[what] += bool(ranks)

    def _count_kinds(self, step: Step, now: float) -> None:
        """Count a step with chosen rows for the ranks that took it; for each of them only now and then."""
        for lowest, ranks in step.kinds.items():
            row = step.rows[lowest]
            self._kinds[ranks, row.flags, row.clip_norm > row.clip_max] += 1
        if self._kinds and (len(self._kinds) > _MOST_KINDS or now - self._counted >= _COUNT_SECONDS):
            self._counted = now
            for (ranks, flags, clipped), steps in self._kinds.items():
                for rank in ranks:
                    self._ranks.setdefault(rank, RankState()).took(steps, flags, clipped=clipped)
            self._kinds.clear()

    @staticmethod
    def _used(step: Step, ranks: Collection[int]) -> int | None:
        """Return what the ranks of a node use of its memory, bytes; they share one limit. None where some are not here.

        Of very many ranks the rows of some are chosen.
        """
        there = [step.rows[rank] for rank in ranks if rank in step.rows]
        if step.chosen and len(there) < len(ranks):
            return None
        return sum((row.host_private_bytes or row.host_bytes) + row.workers_bytes for row in there)

    def _finding(self, record: FindingRaised) -> None:
        finding = record.finding
        if record.new and is_about_making(finding) and finding.severity >= Severity.ERROR:
            found = (math.inf if finding.step is None else finding.step, len(finding.ranks)), frozenset(finding.ranks)
            self._origin = found if self._origin is None else min(self._origin, found, key=lambda pair: pair[0])
        if record.new:
            known = finding.code in {code for code, _ in self._findings} or len(self._findings) < _CODES + len(Severity)
            self._findings[finding.code if known else "other", finding.severity.label] += 1
            self._incidents.append((finding, self._clock()))

        if finding.severity >= Severity.ERROR:
            self._grave[finding.code] = finding

    @property
    def port(self) -> int:
        """The port of the endpoint; 0 if it is closed."""
        return 0 if self._endpoint is None else self._endpoint.port

    @property
    def group(self) -> dict[str, str]:
        """The labels of this rank's group on a Pushgateway."""
        return {"run_id": "" if self._started is None else self._started.run_id, "rank": str(self._rank)}

    def page(self) -> bytes:
        """Return the current metrics as text."""
        return text_of(self.collect())

    @property
    def gravest(self) -> str:
        """The code of the gravest finding at error or above; empty if there is none."""
        worst = max(self._grave.copy().values(), key=lambda finding: finding.severity, default=None)
        return "" if worst is None else worst.code

    @property
    def state(self) -> RunState:
        """The run state of this process."""
        if self._end is not None:
            return self._end.state
        newest = 0 if self._last is None else self._last.step.step
        return RunState.ILL if any(_lasts(each, newest) for each in self._grave.copy().values()) else RunState.RUNNING

    def _place(self, rank: int, place: Mapping[str, Any]) -> None:
        if isinstance(url := place.get("metrics"), str):
            self._targets[rank] = url
        if isinstance(node := place.get("node"), str):
            self._nodes[rank] = node
            self._peers.setdefault(node, set()).add(rank)
        if rank == self._rank or self._everyone:
            state = self._ranks.setdefault(rank, RankState())
            state.node = clean(place.get("node", state.node), 200)
            state.local_rank = clean(place.get("local_rank", state.local_rank), 20)
            state.gpu = clean(place.get("gpu_uuid", state.gpu), 100)

    def _sd(self) -> list[dict[str, object]]:
        """Return the targets of the job, for Prometheus's HTTP service discovery."""
        found = []
        for _, url in sorted(self._targets.copy().items()):
            scheme, _, rest = url.partition("://")
            found.append(target(rest.partition("/")[0], scheme))
        return found

    # -- scraping

    def describe(self) -> list[Metric]:
        """Return an empty list: the metrics are only known when they are collected."""
        return []

    def collect(self, *, every: bool = False) -> Iterator[Metric]:
        """Yield the current metrics with the labels of the run; after its end the lasting ones.

        Args:
            every: of all ranks that this one speaks for, however many.
        """
        if self._end is None:
            yield from self._identified(self._current(every=every))
        else:
            yield from self._lasting()
            yield from self._identified(state_metrics(str(self._rank), self.state, self._end, self._ended))

    def _lasting(self) -> Iterator[Metric]:
        """Return what is true of this process also when it has gone, but for the state."""
        found = self._current(only=self._rank)
        return self._identified(each for each in found if each.name in LASTING or each.type == "counter")

    def _identified(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        identity = identity_of(self._started)
        for metric in metrics:
            for sample in metric.samples:
                sample.labels.update(identity)
            yield metric

    def _current(self, *, every: bool = False, only: int | None = None) -> Iterator[Metric]:
        own, now = str(self._rank), self._clock()
        outvoted = {what: found.copy() for what, found in self._outvoted.items()}
        waiting = self._waiting if now - self._waited <= _BELIEVED else Waiting()
        if self._end is None and len(self._members) > 1 and now - self._met > _SILENT:
            waiting = Waiting(state=WaitState.SILENT, ranks=(self._rank,))
        for rank, state in self._ranks.copy().items():
            state.waiting = waiting.seconds.get(rank, 0.0)
        yield from run_metrics(own, self._started)
        yield from state_metrics(own, self.state, self._end, self._ended)
        if self._speaks:
            yield from finding_metrics(own, self._findings.copy())
            yield from agreement_metrics(own, outvoted, self._disagreements, self._apart)
            yield from incident_metrics(own, tuple(self._incidents))
        if self._speaks or waiting.alone:
            yield from hang_metrics(own, waiting)
        yield from own_metrics(own, self._errors, self._coverage, self._last, now)
        ranks = dict(sorted(self._ranks.copy().items())) if only is None else {only: self._ranks[only]}
        origin = frozenset() if self._origin is None else self._origin[1]
        voted = {what: frozenset().union(*found.values()) for what, found in outvoted.items()}
        of = self._many(ranks, now, voted) if self._is_large and not every and only is None else EachRank()
        yield from rank_metrics([(str(rank), state) for rank, state in ranks.items()], voted, origin, of)
        yield from self._layers.metrics(own, self._ranks[self._rank].newest, self._interval)

    @property
    def _interval(self) -> int:
        return 1 if self._last is None else self._last.interval

    @property
    def _speaks(self) -> bool:
        """Whether this rank reports what all ranks know alike."""
        members = self._members
        if self._everyone or not members or self._clock() - self._met > _BELIEVED:
            return True
        return self._rank in {members[0], members[-1]}

    @property
    def _is_large(self) -> bool:
        """Whether it speaks for so many ranks that their series would be too many."""
        world = max(len(self._ranks), 0 if self._started is None else self._started.world)
        return self._everyone and world > EVERY_RANK

    def _many(self, ranks: Mapping[int, RankState], now: float, outvoted: Mapping[str, frozenset[int]]) -> ManyRanks:
        """Choose whom to show of many ranks; called by one thread at a time."""
        self._recent.look(ranks, now)
        incidents = tuple(self._incidents)
        ill: list[Collection[int]] = [self._waiting.ranks]
        ill += [finding.ranks for finding, _ in reversed(incidents)]
        ill += [] if self._origin is None else [self._origin[1]]
        ill += [[rank for rank, state in ranks.items() if not state.up], *outvoted.values()]
        ill += [self._recent.nonfinite.get(what, ()) for what in NONFINITE]
        rows = {rank: state.newest for rank, state in ranks.items() if state.newest is not None}
        device = {
            r: row.device_reserved_bytes / row.device_limit_bytes for r, row in rows.items() if row.device_limit_bytes
        }
        host = {r: row.host_private_bytes + row.workers_bytes for r, row in rows.items()}
        chosen = self._shown.choose(now, len(ranks), ill, [self._recent.costs, self._recent.own, device, host])
        return ManyRanks({self._rank, *chosen}, self._recent)

    def _page(self, share: float) -> App:
        usual = Page(lambda: text_of(self.collect()), _form, share)
        every = Page(lambda: text_of(self.collect(every=True)), _form, share)
        self._pages += usual, every

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            now = time.monotonic()
            if self._end is not None and now - self.scraped > APART:
                self.scrapes, self.scraped = self.scrapes + 1, now
            asked = self._is_large and "all" in parse_qs(str(environ.get("QUERY_STRING", ""))).get("detail", ())
            return (every if asked else usual)(environ, start_response)

        return app


def _form(environ: Mapping[str, Any]) -> Form:
    """Return the content type that a client gets, and what makes it of the text."""
    if wants_openmetrics(str(environ.get("HTTP_ACCEPT", ""))):
        return OPENMETRICS, openmetrics_of
    return TEXT, bytes


def _lasts(finding: Finding, newest: int) -> bool:
    """Return whether a finding is current: what is reported once, or without a step, never ends."""
    seen = finding.step if finding.last_step is None else finding.last_step
    if ENDED in finding.evidence:
        return False
    return seen is None or finding.code.startswith(TOLD_ONCE) or newest - seen <= _RECENT
