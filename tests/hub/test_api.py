"""The interface for machines, behind a real server: what it takes, what it refuses, what it tells."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import platform
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ddpdebug.hub import app as hub_app, serve
from ddpdebug.hub.app import Feed, create
from ddpdebug.hub.auth import Auth
from ddpdebug.hub.ingest import MAX_BODY, MAX_UNPACKED
from ddpdebug.hub.store import Store
from ddpdebug.processes.pusher import Post, RefusedError
from ddpdebug.run_directory.mirror import Held, Mirror, Piece, digest_of, encode
from tests.hub.runs import MadeUp, Site, bring, finding, serving

RUN = MadeUp(ended=None, findings=[finding()], metrics_url="http://10.0.0.7:9400/metrics")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store(tmp_path_factory.mktemp("hub") / "hub.sqlite")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def site(store: Store) -> Iterator[Site]:
    with serving(create(store, Auth())) as found:
        yield found


def post(site: Site, body: bytes, key: str = RUN.key, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return status and answer of a batch."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(site.address).netloc, timeout=600)
    connection.request("POST", f"/api/v1/runs/{key}/batch", body, headers)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def lines(*values: Any) -> bytes:
    """Return a compressed batch of JSON lines."""
    return gzip.compress(
        "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values).encode()
    )


HEAD = {"run": RUN.key, "from": "push"}
PIECE = {"path": "run.json", "start": 0, "data": base64.b64encode(b"{}").decode(), "replace": True}


#: Body, status of the answer, words in it.
NO_BATCHES = [
    (b"", 400, "gzip|cut off"),
    (b"no gzip", 400, "gzip"),
    (lines(HEAD)[:-9], 400, "cut off"),
    (lines(), 400, "line 1"),
    (lines({"run": MadeUp(run="other").key}), 400, "another run"),
    (lines(HEAD, "[" * 100_000), 400, "line 2"),
    (lines(HEAD, '{"path":' + '{"a":' * 50_000), 400, "line 2"),
    (lines(HEAD, {**PIECE, "path": 5}), 400, "line 2"),
    (lines(HEAD, {**PIECE, "path": "x" * 300}), 400, "line 2"),
    (lines(HEAD, {**PIECE, "start": -1}), 400, "line 2"),
    (lines(HEAD, {**PIECE, "start": True}), 400, "line 2"),
    (lines(HEAD, {**PIECE, "start": 1 << 80}), 400, "line 2"),
    (lines(HEAD, {**PIECE, "data": "***"}), 400, "base64"),
    (lines(HEAD, {**PIECE, "data": {"a": 1}}), 400, "base64"),
    (lines(HEAD, {**PIECE, "data": base64.b64encode(bytes(5 << 20)).decode()}), 413, "more than"),
    (lines(HEAD, {**PIECE, "x": [[]] * 1_000_000}), 413, "commas"),
    (lines({**HEAD, "x": [[]] * 1_000_000}), 413, "commas"),
    (lines(HEAD, {**PIECE, "x": "a" * (6 << 20)}), 413, "more than"),
    (lines(HEAD, *["{}"] * 30_000), 413, "lines"),
    (gzip.compress(bytes(9 << 20)), 413, "a batch may have"),
    (gzip.compress(bytes(MAX_UNPACKED + 1)), 413, "bytes"),
    (gzip.compress(bytes(400 << 20), 1), 413, "bytes"),
    (bytes(MAX_BODY + 1), 413, "bytes"),
]


@pytest.mark.parametrize(("body", "status", "word"), NO_BATCHES, ids=range(len(NO_BATCHES)))
def test_what_is_no_batch(site: Site, body: bytes, status: int, word: str) -> None:
    """What is no batch, or too large for one, is refused with a word about it, and the hub goes on."""
    found, answer = post(site, body)
    assert found == status
    assert any(each in answer["error"] for each in word.split("|"))
    assert site.get("/healthz").status == 200


@pytest.mark.parametrize("key", ["..%2F..%2Fetc", "x", "20261121T080000Z-a%00b", "20261121T080000Z-" + "a" * 99])
def test_what_is_no_run(site: Site, key: str) -> None:
    """A name that no run has is refused."""
    told = urllib.parse.unquote(key)
    assert post(site, lines({"run": told, "from": "push"}, PIECE), key)[0] in {404, 410}


def test_slow_body(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a body for ever is answered and left."""
    monkeypatch.setattr(hub_app, "_BODY_SECONDS", 0.2)
    where = urllib.parse.urlsplit(site.address)
    with socket.create_connection((where.hostname or "", where.port or 0), 600) as slow:
        slow.sendall(f"POST /api/v1/runs/{RUN.key}/batch HTTP/1.1\r\nHost: localhost\r\n".encode())
        slow.sendall(b"Content-Length: 1000\r\n\r\nx")
        assert b"408" in slow.recv(4096)


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET / HTTP/1.1\r\nHost: local",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
        "POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx",
    ],
)
def test_half_a_request(store: Store, monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    """Who sends half a request keeps no connection, neither at first, nor after another request or its answer."""
    monkeypatch.setattr(serve, "_HEAD_SECONDS", 0.5)
    with serving(create(store, Auth())) as site:
        where = urllib.parse.urlsplit(site.address)
        with socket.create_connection((where.hostname or "", where.port or 0), 60) as half:
            half.sendall(sent.encode())
            received = half.recv(4096) if sent.endswith(("x", "HT")) else b""
            with suppress(OSError):  # it is closed
                half.sendall(b"T") if sent else None
            with suppress(ConnectionError):
                while data := half.recv(4096):
                    received += data
        assert (b"HTTP/1.1" in received) is sent.endswith(("x", "HT"))


def test_a_whole_request_may_take_its_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection stays while a request is answered."""
    monkeypatch.setattr(serve, "_HEAD_SECONDS", 0.1)

    async def slow(_: Request) -> Response:
        await asyncio.sleep(0.5)
        return Response("done")

    with serving(create(store, Auth(), pages=[Route("/slow", slow)])) as site:
        assert site.get("/slow").text == "done"


def test_answer_says_what_is_there(site: Site) -> None:
    """The answer to a batch has size and digest of the files that it named, and of all where that is asked for."""
    key = MadeUp(run="answer").key
    post(site, encode(key, "push", [Piece("steps.bin", 0, b"abc")]), key)
    post_ = Post(site.address, key, lambda: "")
    assert post_.send([Piece("run.json", 0, b"{}", replace=True)]) == {"run.json": Held(2, digest_of(b"{}"))}
    assert post_.send([], all_files=True).keys() == {"run.json", "steps.bin"}


def test_disk_full(tmp_path: Path) -> None:
    """While there is no room the hub says so and shows what it has; afterwards it takes what it has missed."""
    directory = RUN.write(tmp_path / "run")
    large = MadeUp(run="large1", steps=600).write(tmp_path / "large")
    store = Store(tmp_path / "hub.sqlite")
    with serving(create(store, Auth())) as site:
        for path, fits in ((directory, True), (large, False), (large, True)):
            with store.write() as connection:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            store._engine.dispose()
            limit = 1 << 30 if fits else pages + 20
            hub_limit(store, limit)
            mirror = Mirror(path)
            post_ = Post(site.address, mirror.key, lambda: "")
            if fits:
                mirror.bring(post_.send)
            else:
                with pytest.raises(RefusedError, match="507 nothing can be stored") as refused:
                    mirror.bring(post_.send)
                assert not refused.value.for_good
            assert json.loads(site.get(f"/api/v1/runs/{RUN.key}").text)["last_step"] == 39
        found = json.loads(site.get(f"/api/v1/runs/{MadeUp(run='large1').key}").text)
        assert found["last_step"] == 599
        assert sum(each["steps"] for each in found["steps"]) == 1200


def hub_limit(store: Store, pages: int) -> None:
    """Let a database have so many pages only, as if the disk were as large."""
    from sqlalchemy import event

    event.listen(store._engine, "connect", lambda one, _: one.execute(f"PRAGMA max_page_count = {pages}"))


def test_runs_and_findings(site: Site, store: Store, tmp_path: Path) -> None:
    """Runs, a run, its files and findings since a time are told as JSON."""
    directory = RUN.write(tmp_path / "run")
    bring(store, directory, "push")
    listed = json.loads(site.get("/api/v1/runs?state=ill&code=RANK104").text)["runs"]
    assert [(run["key"], run["state"], run["severity"]) for run in listed] == [(RUN.key, "ill", "critical")]
    run = json.loads(site.get(f"/api/v1/runs/{RUN.key}").text)
    assert run["document"] == json.loads((directory / "run.json").read_text())
    assert run["findings"][0]["code"] == "RANK104"
    file = site.get(f"/api/v1/runs/{RUN.key}/files/findings.jsonl")
    assert file.text == (directory / "findings.jsonl").read_text()
    assert file.headers["content-type"] == "application/octet-stream"
    assert site.get(f"/api/v1/runs/{RUN.key}/files/..%2Frun.json").status == 404
    assert site.get("/api/v1/runs/nothing").status == 404
    told = json.loads(site.get("/api/v1/findings").text)
    assert [(each["run"], each["finding"]["code"]) for each in told["findings"]] == [(RUN.key, "RANK104")]
    assert json.loads(site.get(f"/api/v1/findings?since={told['next'] + 100}").text)["findings"] == []


@pytest.mark.parametrize(
    "query",
    [
        "state=x'--",
        "code=%00",
        "limit=nan",
        "limit=-5",
        "limit=1e400",
        "since=inf",
        "since=nan",
        "before=%FF",
        "owner=%ED%A0%80",
    ],
)
def test_odd_queries(site: Site, query: str) -> None:
    """Whatever stands in a filter is a value and no more."""
    assert site.get(f"/api/v1/runs?{query}").status == 200
    assert site.get(f"/api/v1/findings?{query}").status == 200


def test_targets(store: Store, site: Site, tmp_path: Path) -> None:
    """The ranks of live runs are targets of Prometheus; loopback addresses are so on their own host only."""
    for number, url in enumerate(
        (None, "http://10.0.0.8:9400/metrics", "http://127.0.0.1:9400/metrics", "javascript:1")
    ):
        run = MadeUp(run=f"target{number}", ended=None, metrics_url=url, node="elsewhere")
        bring(store, run.write(tmp_path / run.run), "push")
    here = MadeUp(run="here", ended=None, metrics_url="https://[::1]:9401/metrics", node=platform.node())
    bring(store, here.write(tmp_path / "here"), "push")
    over = replace(RUN, run="over", ended="finished", metrics_url="http://10.0.0.9:9400/metrics")
    bring(store, over.write(tmp_path / "over"), "push")
    found = {target["targets"][0]: target["labels"] for target in json.loads(site.get("/sd").text)}
    assert found["10.0.0.8:9400"] == {"sd": "hub"}
    assert found["[::1]:9401"] == {"sd": "hub", "__scheme__": "https"}
    assert not {"127.0.0.1:9400", "10.0.0.9:9400"} & found.keys()


def test_metrics(store: Store, site: Site, tmp_path: Path) -> None:
    """Prometheus can read how many runs are in which state; a code that is none has no series of its own."""
    odd = MadeUp(run="odd", ended=None, findings=[finding('A"}\n1')])
    bring(store, odd.write(tmp_path / "odd"), "push")
    families = {each.name: each for each in text_string_to_metric_families(site.get("/metrics").text)}
    states = {sample.labels["state"]: sample.value for sample in families["ddpdebug_hub_runs"].samples}
    assert states["ill"] >= 1
    assert "other" in {sample.labels["code"] for sample in families["ddpdebug_hub_findings"].samples}


def test_events(store: Store, site: Site, tmp_path: Path) -> None:
    """Who listens hears of runs and findings as they come."""
    where = urllib.parse.urlsplit(site.address)
    heard: dict[str, Any] = {}
    listening = threading.Event()

    def listen() -> None:
        connection = http.client.HTTPConnection(where.netloc, timeout=600)
        connection.request("GET", "/api/v1/events")
        answer = connection.getresponse()
        kind = ""
        while heard.keys() != {"run", "finding"}:
            line = answer.readline().decode().strip()
            listening.set()
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: ") and "events1" in line:
                heard[kind] = json.loads(line.removeprefix("data: "))
        connection.close()

    thread = threading.Thread(target=listen)
    thread.start()
    assert listening.wait(600)
    run = MadeUp(run="events1", ended=None, findings=[finding()])
    bring(store, run.write(tmp_path / "run"), "push")
    thread.join(600)
    assert heard["run"]["state"] == "ill"
    assert heard["finding"]["finding"]["code"] == "RANK104"


def test_one_failure_ends_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens hears the next news after a look that failed, whatever the reason; each reason is said once."""
    store, said, failures = Store(tmp_path / "hub.sqlite"), list[str](), dict[str, int]()
    again = threading.Event()

    def failing(name: str) -> Callable[..., Any]:
        works = getattr(store, name)

        def call(*args: Any, **more: Any) -> Any:
            failures[name] = failures.get(name, 0) + 1
            if failures[name] < 3:
                raise RecursionError(name)
            if name == "forget":
                again.set()
            return works(*args, **more)

        return call

    monkeypatch.setattr(hub_app, "_NEWS", 0.01)
    for name in ("findings", "forget"):
        monkeypatch.setattr(store, name, failing(name))
    with serving(create(store, Auth(), feed=Feed(store, said.append), every=0.01)) as site:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(site.address).netloc, timeout=600)
        connection.request("GET", "/api/v1/events")
        answer = connection.getresponse()
        assert answer.readline()
        bring(store, MadeUp(findings=[finding()]).write(tmp_path / "run"), "push")
        while answer.readline() != b"event: finding\n":
            pass
        connection.close()
        assert again.wait(600)
    assert sorted(said) == [
        "who is lost is not seen now, and nothing is deleted: RecursionError: forget",
        "who listens is told nothing now: RecursionError: findings",
    ]
