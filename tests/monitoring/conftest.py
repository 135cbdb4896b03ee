"""A real Prometheus, and ranks for it to scrape."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import situations
from grafana_model import Series
from machine import PATIENCE, free_port, until

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus.exporter import PrometheusSink

WORLD = 4


class Server:
    """A program with an HTTP interface, ready to be asked."""

    def __init__(self, words: list[str], url: str, ready: str, log: Path) -> None:
        self.url = url
        with log.open("wb") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        self._ready = url + ready
        until(lambda: self._answers() or self.process.poll() is not None)
        if not self._answers():
            pytest.fail(log.read_text())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready, timeout=30):
                return True
        except OSError:
            return False

    def get(self, path: str, **parameters: str | float) -> Any:
        """Fetch JSON."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=100) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())

    def stop(self) -> None:
        """End the program that this object started."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)


class Prometheus(Server):
    """Prometheus, asked in PromQL."""

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; fail on an expression that it does not accept."""
        answer = self.get("/api/v1/query", query=expression)
        assert answer["status"] == "success", f"{answer.get('error')} in {expression}"
        found = answer["data"]["result"]
        return list(found) if answer["data"]["resultType"] == "vector" else [{"value": found}]

    def range(self, expression: str, seconds: float = 60, step: float = 1) -> list[dict[str, Any]]:
        """Return the series of a range query over the last seconds."""
        now = time.time()
        answer = self.get("/api/v1/query_range", query=expression, start=now - seconds, end=now, step=step)
        assert answer["status"] == "success", f"{answer.get('error')} in {expression}"
        return list(answer["data"]["result"])

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Wait until the expression returns something, and return it."""
        found = until(lambda: self.query(expression), pause=0.2)
        assert found, f"nothing within {PATIENCE} s: {expression}"
        return found


@pytest.fixture(scope="session")
def start_prometheus(
    need: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Prometheus]]:
    """Start a Prometheus with this configuration; it ends with the tests."""
    with ExitStack() as stack:

        def start(configuration: str, *flags: str) -> Prometheus:
            program = need("prometheus")
            folder = tmp_path_factory.mktemp("prometheus")
            (folder / "prometheus.yml").write_text(configuration)
            address = f"127.0.0.1:{free_port()}"
            words = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
            words += [f"--web.listen-address={address}", "--web.enable-lifecycle", "--log.level=warn", *flags]
            server = Prometheus(words, f"http://{address}", "/-/ready", folder / "log")
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def start_alertmanager(
    need: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start an Alertmanager with this configuration, or one that keeps what it gets."""
    with ExitStack() as stack:

        def start(configuration: str = "route: {receiver: none}\nreceivers: [{name: none}]\n") -> Server:
            program = need("prometheus-alertmanager")
            folder = tmp_path_factory.mktemp("alertmanager")
            (folder / "alertmanager.yml").write_text(configuration)
            address = f"127.0.0.1:{free_port()}"
            words = [program, f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'data'}"]
            words += [f"--web.listen-address={address}", "--cluster.listen-address="]
            server = Server(words, f"http://{address}", "/-/ready", folder / "log")
            stack.callback(server.stop)
            return server

        yield start


class Ranks:
    """Four ranks that step five times a second without training: what they export is all that there is to export."""

    def __init__(self) -> None:
        self.sinks = [PrometheusSink(rank) for rank in range(WORLD)]
        for sink in self.sinks:
            sink.serve()
        self.step = 0
        self._stop = threading.Event()
        for rank, sink in enumerate(self.sinks):
            started = RunStarted(
                run_id="r1", rank=rank, world=WORLD, directory=None, config={"budget": 0.01}, node=f"node{rank // 2}",
                local_rank=rank % 2, versions={"torch": "2.13.0", "ddpdebug": "0.1"}, metrics_url=sink.url,
            )  # fmt: skip
            sink.write(started)
            for each, other in enumerate(self.sinks):
                place = {"node": f"node{each // 2}", "local_rank": each % 2, "metrics": other.url}
                for value in (place, {"gpu_uuid": f"GPU-{each}"}):
                    sink.write(Saved(kind="fact", payload={"rank": each, "topic": "place", "value": value}))
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the steps and the endpoints."""
        self._stop.set()
        self._thread.join()
        for sink in self.sinks:
            sink.close()

    def _go(self) -> None:
        while not self._stop.wait(0.2):
            record = StepJudged(step=self._next(), interval=4, overhead_ratio=0.012)
            for sink in self.sinks:
                sink.write(record)
                sink.write(Saved(kind="detail", payload=_layers(self.sinks.index(sink))))
                if self.step in {20, 24}:
                    sink.write(FindingRaised(finding=_finding(self.step)))
            self.step += 1

    def _next(self) -> Step:
        sick = self.step >= 20
        rows = {}
        known = Row._fields
        extra = {"host_limit_bytes": 16 << 30, "device_limit_bytes": 80 << 30, "host_private_bytes": 1 << 30}
        for rank in range(WORLD):
            bad = sick and rank == 2
            flags = Flag.CHECKED | (Flag.LOCAL_GRADS_NONFINITE | Flag.SKIPPED | Flag.UNSYNCED_BACKWARD if bad else 0)
            digest = Digest(7 + bad)
            rows[rank] = Row(
                rank=rank, step=self.step, flags=int(flags), loss=2.0 + 0.1 * rank, lr=1e-3, loss_scale=1024.0,
                param_norm=9.0, update_norm=0.01, val_loss=2.2,
                local_grad_norm=2.0 + rank, grad_norm=1.5, clip_norm=1.5, clip_max=1.0, step_seconds=0.2,
                data_seconds=0.01, forward_seconds=0.05 * (1 + bad), backward_seconds=0.1 - 0.05 * bad,
                backward_local_seconds=0.04, sync_wait_seconds=0.06 - 0.05 * bad, optimizer_seconds=0.01,
                host_bytes=(1 << 30) + self.step * 1000, device_allocated_bytes=20 << 30, without_grad=1,
                device_reserved_bytes=30 << 30, device_peak_bytes=25 << 30, params_after_digest=digest,
                grads_digest=Digest(5), hyper_digest=Digest(5), buffers_digest=Digest(5), state_digest=digest,
                **{name: value for name, value in extra.items() if name in known},
            )  # fmt: skip
        return Step(step=self.step, optimizer=0, world=WORLD, rows=rows)


def _layers(rank: int) -> dict[str, Any]:
    weights = {f"blocks.{i}.weight": {"norm": 4.0, "update": 0.01 * i, "grad_norm": 0.1, "dim": 2} for i in range(3)}
    seen = {"blocks.0.relu": {"kind": "relu", "zero_units": 0.3}, "gate": {"kind": "sigmoid", "saturated": 0.2}}
    value = {"modules": seen, "parameters": weights, "order": list(weights)}
    return {"rank": rank, "optimizer": 0, "step": 1, "detail": "layers", "value": value}


def _finding(step: int) -> Finding:
    return Finding(
        code="RANK101", severity=Severity.CRITICAL, title="t", step=step, ranks=(2,), id=f"RANK101-{step}",
        subject=('layers.3."quoted"\\n<b>',),
    )  # fmt: skip


@pytest.fixture(scope="session")
def ranks(need: Callable[[str], str]) -> Iterator[Ranks]:
    """Four ranks to scrape; rank 2 is ill from step 20 on."""
    need("prometheus")
    made = Ranks()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def scraped(ranks: Ranks, start_prometheus: Callable[..., Prometheus]) -> Prometheus:
    """Prometheus that has found the ranks on its own and scraped them for a while."""
    discovery = ranks.sinks[0].url.replace("/metrics", "/sd")
    server = start_prometheus(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES / 'ddpdebug.yml'}]\n"
        "scrape_configs:\n"
        f'- {{job_name: ddpdebug, http_sd_configs: [{{url: "{discovery}", refresh_interval: 1s}}]}}\n'
    )
    server.wait_for(f"count(ddpdebug_rank_outvoted{{what='parameters'}}) == {WORLD} and on () "
                    "count_over_time(ddpdebug_incident_step{rank='0', incident='RANK101-24'}[1m]) >= 8")  # fmt: skip
    return server


#: Name of the situation -> seconds between its last scrape and the moment at which it is looked at.
SITUATIONS = {"healthy": 1, "disagreeing": 1, "nan": 1, "hung": 1, "waiting": 1, "slow": 1, "killed": 480, "ended": 480}
RULES = Path(__file__).parent.parent.parent / "deploy" / "prometheus" / "rules"
_EVALUATION = 15


class Recorded:
    """Runs as they were recorded, side by side in a Prometheus that has evaluated the rules over them.

    `now` is when one looks at them: six still run, the others ended some minutes before. `ids` has their run ids.
    """

    def __init__(self, server: Prometheus) -> None:
        self._server = server
        self.now = time.time() // _EVALUATION * _EVALUATION
        self.ids: dict[str, str] = {}
        series = []
        for name, ago in SITUATIONS.items():
            made = list(situations.samples(name, self.now - ago))
            (self.ids[name],) = {labels["run_id"] for labels, _ in made if "run_id" in labels}
            series += made
        self.write(series)
        self._begin = min(points[0][0] for _, points in series) // _EVALUATION * _EVALUATION
        yaml = pytest.importorskip("yaml")
        files = ("ddpdebug.yml", "ddpdebug-alerts.yml")
        state, *others = (group for name in files for group in yaml.safe_load((RULES / name).read_text())["groups"])
        self._recording = {
            rule["record"]: rule["expr"] for group in (state, *others) for rule in group["rules"] if "record" in rule
        }
        self._step_by_step(state["rules"])  # they look at what they have said before
        for rule in (rule for group in others for rule in group["rules"]):
            self._over_the_range(rule)

    def write(self, series: Any) -> None:
        """Add samples."""
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        body = situations.write_request(series)
        request = urllib.request.Request(f"{self._server.url}/api/v1/write", body, headers)
        with urllib.request.urlopen(request, timeout=100) as answer:
            assert answer.status == 204

    def instant(self, expression: str, at: float | None = None) -> list[Series]:
        """Return the vector of an expression at a moment, now if none is given."""
        moment = self.now if at is None else at
        answer = self._server.get("/api/v1/query", query=expression, time=moment)
        assert answer["status"] == "success", f"{answer.get('error')} in {expression}"
        assert answer["data"]["resultType"] == "vector", expression
        return [(each["metric"], [(moment, float(each["value"][1]))]) for each in answer["data"]["result"]]

    def range(self, expression: str, begin: float, step: float) -> list[Series]:
        """Return the series of an expression from a moment until now."""
        answer = self._server.get("/api/v1/query_range", query=expression, start=begin, end=self.now, step=step)
        assert answer["status"] == "success", f"{answer.get('error')} in {expression}"
        found = answer["data"]["result"]
        return [(each["metric"], [(float(t), float(v)) for t, v in each["values"]]) for each in found]

    def evaluated(self, name: str) -> list[Series]:
        """Return what a recording rule would record now, of what has been written since, too."""
        return self.instant(self._recording[name])

    def touched(self, expression: str, begin: float | None = None, step: float = _EVALUATION) -> int:
        """Return how many samples Prometheus reads for a query: an instant one, or over the range from `begin`."""
        if begin is None:
            answer = self._server.get("/api/v1/query", query=expression, time=self.now, stats="all")
        else:
            answer = self._server.get(
                "/api/v1/query_range", query=expression, start=begin, end=self.now, step=step, stats="all"
            )
        return int(answer["data"]["stats"]["samples"]["totalQueryableSamples"])

    def _step_by_step(self, rules: list[dict[str, Any]]) -> None:
        alive: dict[str, list[dict[str, str]]] = {}
        moment = self._begin
        while moment <= self.now:
            for rule in rules:
                name = rule["record"]
                found = [
                    ({**labels, "__name__": name}, points) for labels, points in self.instant(rule["expr"], moment)
                ]
                gone = [labels for labels in alive.get(name, ()) if labels not in [known for known, _ in found]]
                alive[name] = [labels for labels, _ in found]
                self.write([*found, *((labels, [(moment, situations.STALE)]) for labels in gone)])
            moment += _EVALUATION

    def _over_the_range(self, rule: dict[str, Any]) -> None:
        made = []
        for labels, found in self.range(rule["expr"], self._begin, _EVALUATION):
            points = found if "record" in rule else _firing(found, rule)
            if "record" in rule:
                known = {**labels, **rule.get("labels", {}), "__name__": rule["record"]}
            else:
                plain = {name: value for name, value in labels.items() if name != "__name__"}
                known = {**plain, **rule["labels"], "__name__": "ALERTS", "alertname": rule["alert"]}
                known["alertstate"] = "firing"
            ended = [t + _EVALUATION for (t, _), (later, _) in pairwise([*points, (math.inf, 0)]) if later > t + 20]
            stale = [(moment, situations.STALE) for moment in ended if moment <= self.now]
            made.append((known, sorted([*points, *stale])))
        self.write([each for each in made if each[1]])


def _firing(points: Any, rule: dict[str, Any]) -> list[tuple[float, float]]:
    """Return when an alert fires that is pending at these points."""
    number, unit = re.fullmatch(r"(\d+)([smh])", rule.get("for", "0s")).groups()  # type: ignore[union-attr]
    patience = int(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    made, since, last = [], -math.inf, -math.inf
    for moment, _ in points:
        since = moment if moment > last + 1.5 * _EVALUATION else since
        last = moment
        if moment - since >= patience:
            made.append((moment, 1.0))
    return made


@pytest.fixture(scope="session")
def record(start_prometheus: Callable[..., Prometheus]) -> Callable[[], Recorded]:
    """Make a Prometheus that has the eight situations."""
    return lambda: Recorded(start_prometheus("global: {}\n", "--web.enable-remote-write-receiver"))


@pytest.fixture(scope="session")
def recorded(record: Callable[[], Recorded]) -> Recorded:
    """The eight situations, ready to be drawn; to be read only."""
    return record()
