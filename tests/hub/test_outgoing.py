"""What a hub tells others: real messages to real servers, each once, later where nobody answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from run_records import FINDING

from ddpdebug.errors import UsageError
from ddpdebug.hub.outgoing import Hook, Outgoing, read_hooks
from ddpdebug.hub.schema import note
from ddpdebug.hub.store import Store
from ddpdebug.run_directory.mirror import Piece
from ddpdebug.schema.finding import Finding, Severity, strict_json

_NOW = datetime(2026, 11, 21, 2, 10, tzinfo=UTC).timestamp()
_KEY = "20261121T020800Z-abc123"


class _Listener:
    """A server that keeps what it is told, and answers as it is told to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Mapping[str, str], Any]] = []
        self.status, self.headers = 200, dict[str, str]()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.told.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()}, json.loads(body))
                )
                self.send_response(listener.status)
                for name, value in listener.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Hub:
    """A store at a time that the test sets, with one run in it."""

    def __init__(self, folder: Path) -> None:
        self.now, self.said = _NOW, list[str]()
        self.store = Store(folder / "hub.db", clock=lambda: self.now)

    def receive(self, *findings: Finding, name: str = "gpt", key: str = _KEY, **run: Any) -> None:
        begun = f"{key[:4]}-{key[4:6]}-{key[6:8]}T{key[9:11]}:{key[11:13]}:{key[13:15]}Z"
        record = {"run": key.partition("-")[2], "time": begun, "world": 4, "name": name, "outcome": None, **run}
        lines = "".join(f"{finding.to_json()}\n" for finding in findings).encode()
        pieces = [Piece("run.json", 0, strict_json(record).encode(), replace=True)]
        pieces.append(Piece("findings.jsonl", 0, lines, replace=True))
        self.store.receive(key, "push", pieces)

    def lose(self) -> None:
        """Let the run be silent for so long that it is lost; a hub that has just begun to look may have stood still."""
        found = []
        for _ in range(5):
            self.now += 12
            found += self.store.look_again()
        assert found == [_KEY]

    def outgoing(self, *hooks: Hook, **more: Any) -> Outgoing:
        return Outgoing(self.store, hooks, say=self.said.append, **more)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[_Hub]:
    found = _Hub(tmp_path)
    yield found
    found.store.close()


@pytest.fixture
def listener() -> Iterator[_Listener]:
    found = _Listener()
    yield found
    found.close()


def test_a_finding_is_told_once_to_who_wants_it(hub: _Hub, listener: _Listener) -> None:
    """As Slack reads it, with a link; names are no markup."""
    warning = replace(FINDING, id="SLOW601-1", code="SLOW601", severity=Severity.WARNING)
    hostile = replace(FINDING, title="<!channel> & <http://evil|x>", subject=("<b>",), location="train.py:7")
    outgoing = hub.outgoing(
        Hook(name="all", url=f"{listener.url}/all", severity=Severity.WARNING),
        Hook(name="numerics", url=f"{listener.url}/numerics", codes=("NUM*",)),
        address="https://hub.example/",
    )
    hub.receive(hostile, warning, name="gpt <small>")
    assert (outgoing.look(), outgoing.look()) == (2, 0)
    hub.receive(replace(hostile, count=9), warning, name="gpt <small>")  # the same again
    assert outgoing.look() == 0
    assert [path for path, _, _ in listener.told] == ["/all", "/all"]
    body = next(body for _, _, body in listener.told if "RANK101" in body["text"])
    link = f"<https://hub.example/runs/{_KEY}|gpt &lt;small&gt;>"
    assert body["text"] == f"critical RANK101 in {link}: &lt;!channel&gt; &amp; &lt;http://evil|x&gt;"
    fields = {field["title"]: field["value"] for field in body["attachments"][0]["fields"]}
    assert fields["what"] == "&lt;b&gt;"
    assert "rank 2" in fields["where"]
    assert "train.py:7" in fields["where"]


def test_what_is_old_or_acknowledged_is_no_news(hub: _Hub, listener: _Listener) -> None:
    """Runs that are imported from another day, a group that somebody looks after, one that is muted until later."""
    outgoing = hub.outgoing(Hook(name="all", url=listener.url))
    hub.receive(replace(FINDING, time="2026-11-20T02:09:00Z"))
    assert outgoing.look() == 0
    hub.receive(replace(FINDING, id="RANK101-2"), key="20261121T020801Z-abc124")
    with hub.store.write() as connection:
        group = connection.exec_driver_sql('SELECT "group" FROM finding LIMIT 1').scalar_one()
        connection.execute(note.insert().values(group=group, kind="mute", time=hub.now, until=hub.now + 600))
    assert outgoing.look() == 0
    hub.now += 601
    assert outgoing.look() == 1


def test_what_comes_after_an_acknowledgement_is_news(hub: _Hub, listener: _Listener) -> None:
    """As on the pages: an acknowledgement is of what was there."""
    outgoing = hub.outgoing(Hook(name="all", url=listener.url))
    hub.receive(FINDING)
    with hub.store.write() as connection:
        group = connection.exec_driver_sql('SELECT "group" FROM finding LIMIT 1').scalar_one()
        connection.execute(note.insert().values(group=group, kind="ack", time=hub.now))
    assert outgoing.look() == 0
    hub.now += 60
    hub.receive(FINDING, key="20261121T020801Z-abc124", name="bert")
    assert outgoing.look() == 1
    assert listener.told[0][2]["text"].startswith("critical RANK101 in bert")


def test_a_run_that_is_lost_or_fails_is_told(hub: _Hub, listener: _Listener) -> None:
    """Nobody else can tell that a whole job has gone."""
    outgoing = hub.outgoing(Hook(name="all", url=listener.url))
    hub.receive()
    assert outgoing.look() == 0
    hub.lose()
    assert (outgoing.look(), outgoing.look()) == (1, 0)
    ((_, _, body),) = listener.told
    assert body["text"] == "the run gpt is lost"
    hub.receive(outcome={"reason": "exception: KeyError: 'x'", "exit_code": 1, "steps": {}, "time": ""})
    assert outgoing.look() == 1
    assert listener.told[-1][2]["text"] == "the run gpt is failed"


def test_a_run_that_is_back_is_not_told_as_lost(hub: _Hub, listener: _Listener) -> None:
    """Where the message did not arrive before; a later loss is told again."""
    outgoing = hub.outgoing(Hook(name="all", url=listener.url))
    hub.receive()
    hub.lose()
    listener.status = 500
    assert (outgoing.look(), len(listener.told)) == (0, 1)
    listener.status = 200
    hub.now += 40
    hub.receive()
    assert (outgoing.look(), len(listener.told)) == (0, 1)
    hub.lose()
    assert (outgoing.look(), len(listener.told)) == (1, 2)


def test_who_does_not_answer_is_told_later(hub: _Hub, listener: _Listener) -> None:
    """By another hub on the same database, if need be; with the pause that the server asks for."""
    hook = Hook(name="all", url=listener.url)
    listener.status, listener.headers = 429, {"Retry-After": "90"}
    hub.receive(FINDING)
    assert hub.outgoing(hook).look() == 0
    assert len(listener.told) == 1
    hub.now += 60
    assert hub.outgoing(hook).look() == 0
    assert len(listener.told) == 1  # not yet
    listener.status, listener.headers = 200, {}
    hub.now += 31
    later = hub.outgoing(hook)
    assert (later.look(), later.look()) == (1, 0)
    assert hub.said == []


@pytest.mark.parametrize("status, tries", [(404, 1), (302, 12), (500, 12)])
def test_who_never_takes_it_is_given_up_and_said_once(hub: _Hub, listener: _Listener, status: int, tries: int) -> None:
    """A redirect is not followed: what is told goes to the address that was given."""
    listener.status, listener.headers = status, {"Location": f"{listener.url}/elsewhere"}
    outgoing = hub.outgoing(Hook(name="all", url=f"{listener.url}/secret"))
    hub.receive(FINDING)
    for _ in range(20):
        outgoing.look()
        hub.now += 3601
    assert [path for path, _, _ in listener.told] == ["/secret"] * tries
    assert hub.said == [f"the webhook 'all' answers with {status}; what it should have been told is on the pages"]
    assert "secret" not in "".join(hub.said)


def test_who_speaks_no_http_is_told_later(hub: _Hub) -> None:
    """As who does not answer at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 smtp.example ready\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        hub.receive(FINDING)
        assert hub.outgoing(Hook(name="all", url=f"http://127.0.0.1:{server.getsockname()[1]}")).look() == 0
        thread.join()


def test_a_failure_ends_no_thread(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: it is said once, and the next look tells what is due."""
    monkeypatch.setattr("ddpdebug.hub.outgoing._EVERY_SECONDS", 0.01)
    told, failing = threading.Event(), iter([True, True])

    def post(*_: Any) -> tuple[int, float]:
        if next(failing, False):
            hub.now += 60
            raise RuntimeError("odd")
        told.set()
        return 200, 0.0

    hub.receive(FINDING)
    outgoing = hub.outgoing(Hook(name="all", url="http://127.0.0.1:9"), post=post)
    outgoing.start()
    assert told.wait(600)
    outgoing.close()
    assert hub.said == ["nothing is sent to webhooks: RuntimeError: odd"]


def test_who_is_dead_delays_nobody(hub: _Hub) -> None:
    """One attempt of all that waits for a target that fails is made in a look; the others are told all."""
    asked: list[str] = []

    def post(url: str, *_: Any) -> tuple[int, float]:
        asked.append(url)
        return (0, 0.0) if "dead" in url else (200, 0.0)

    hub.receive(*(replace(FINDING, id=f"RANK101-{number}", step=number) for number in range(60)))
    hooks = Hook(name="dead", url="http://dead"), Hook(name="live", url="http://live")
    outgoing = hub.outgoing(*hooks, post=post)
    assert (outgoing.look(), outgoing.look()) == (50, 10)
    assert asked.count("http://dead") == 2


def test_a_message_is_taken_for_as_long_as_it_is_sent(hub: _Hub) -> None:
    """No other hub sends it while the first one still waits for the answer."""
    hook = Hook(name="all", url="http://slow")
    asked: list[str] = []

    def post(url: str, *_: Any) -> tuple[int, float]:
        asked.append(url)
        hub.now += 10  # as long as an attempt may take
        if len(asked) == 1:
            hub.outgoing(hook, post=post).look()
        return 200, 0.0

    hub.receive(FINDING)
    assert hub.outgoing(hook, post=post).look() == 1
    assert len(asked) == 1


def test_two_hubs_on_one_database_send_a_message_once(hub: _Hub, listener: _Listener) -> None:
    """Who takes it first sends it."""
    hook = Hook(name="all", url=listener.url)
    hub.receive(*(replace(FINDING, id=f"RANK101-{number}", step=number) for number in range(20)))
    hubs = [hub.outgoing(hook) for _ in range(4)]
    threads = [threading.Thread(target=one.look) for one in hubs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(listener.told) == 20


def test_the_file_of_webhooks(tmp_path: Path) -> None:
    file = tmp_path / "webhooks.toml"
    file.write_text(
        '[team]\nurl = "https://hooks.example/T0/secret"\ncodes = ["RANK*", "NUM3*"]\nseverity = "critical"\n'
        '[night]\nurl = "http://127.0.0.1:9"\nstates = []\n'
    )
    team, night = read_hooks(file)
    assert (team.name, team.codes, team.severity) == ("team", ("RANK*", "NUM3*"), Severity.CRITICAL)
    assert team.wants("RANK101", "critical")
    assert not team.wants("RANK101", "error")
    assert not team.wants("SLOW601", "critical")
    assert night.states == frozenset()


@pytest.mark.parametrize(
    "text, says",
    [
        ("[a", "cannot read the webhooks"),
        ("a = 1", "is no table"),
        ("[a]\n", "needs a url"),
        ('[a]\nurl = "ftp://x"', "needs a url"),
        ('[a]\nurl = "http://x"\ncode = []', "unknown key 'code'; did you mean codes"),
        ('[a]\nurl = "http://x"\ncodes = "RANK*"', "is no list of texts"),
        ('[a]\nurl = "http://x"\nstates = ["dead"]', "there is no state 'dead'"),
        ('[a]\nurl = "http://x"\nseverity = "bad"', "unknown severity 'bad'"),
    ],
)
def test_what_is_wrong_in_it_is_said(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "webhooks.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_hooks(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_hooks(tmp_path / "none")
