"""Dashboards in a Grafana: a small one of our own, and a real one behind --grafana-url."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ddpdebug.commands import main
from ddpdebug.errors import UsageError
from ddpdebug.grafana.client import Grafana, GrafanaError
from ddpdebug.grafana.dashboards import NAMES, shipped

TOKEN = "glsa_secret"


class Handler(BaseHTTPRequestHandler):
    """Answers as Grafana does, below a path."""

    fake: FakeGrafana

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if not known:
            self.answer(401, {"message": f"Unauthorized {self.headers['Authorization']}"})
        return not known

    def do_GET(self) -> None:
        if self.refused():
            return
        parts = urlsplit(self.path)
        if parts.path.startswith("/sub/api/dashboards/uid/"):
            found = self.fake.dashboards.get(parts.path.rpartition("/")[2])
            self.answer(*((404, {"message": "not found"}) if found is None else (200, found)))
        else:
            asked = {name: int(value) for name, (value,) in parse_qs(parts.query).items()}
            first = (asked["page"] - 1) * asked["limit"]
            self.answer(200, self.fake.folders[first : first + asked["limit"]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == "/sub/api/folders":
            self.fake.folders.append({"uid": f"f{len(self.fake.folders)}", "title": body["title"]})
            self.answer(200, self.fake.folders[-1])
        else:
            board = body["dashboard"]
            self.fake.dashboards[board["uid"]] = {"dashboard": board, "meta": {"folderUid": body["folderUid"]}}
            self.answer(200, {"url": f"/d/{board['uid']}"})


class FakeGrafana:
    """Keeps dashboards as Grafana does."""

    def __init__(self) -> None:
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.folders: list[dict[str, Any]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}/sub/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def fake() -> Iterator[FakeGrafana]:
    """Serve on any port, below a path."""
    made = FakeGrafana()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_dashboards_are_pushed_and_pushed_again(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All six, under their uids, without a numeric id."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    for _ in range(2):
        assert main(["dashboards", "push", "--url", fake.url]) == 0
    assert set(fake.dashboards) == {f"ddpdebug-{name}" for name in NAMES}
    assert all(entry["dashboard"]["id"] is None for entry in fake.dashboards.values())
    assert "/d/ddpdebug-overview" in capsys.readouterr().out


def test_dashboards_are_pushed_into_a_folder_which_is_made_once(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a thousand others; without the option they stay where they are, at first in General."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    words = ["dashboards", "push", "--url", fake.url]

    def folders() -> set[str]:
        return {entry["meta"]["folderUid"] for entry in fake.dashboards.values()}

    assert main(words) == 0
    assert folders() == {""}
    fake.folders = [{"uid": f"f{i}", "title": f"folder {i}"} for i in range(1000)]
    for _ in range(2):
        assert main([*words, "--folder", "Training runs"]) == 0
    assert [each["title"] for each in fake.folders[1000:]] == ["Training runs"]
    assert folders() == {"f1000"}
    assert main(words) == 0
    assert folders() == {"f1000"}
    assert main([*words, "--folder", "General"]) == 0
    assert folders() == {""}


def test_a_grafana_that_is_not_there_is_one_error_in_plain_words(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not six, and without the insides of a library."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    fake.server.shutdown()
    fake.server.server_close()
    for more in ([], ["--folder", "Training runs"]):
        assert main(["dashboards", "push", "--url", fake.url, *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"ddpdebug: error: Grafana did not answer at {fake.url.rstrip('/')}: connection refused"


def test_what_others_made_is_left_alone_unless_forced(
    fake: FakeGrafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what that Grafana reads from files; the rest is pushed all the same."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    foreign = {"dashboard": {"title": "mine", "tags": None}, "meta": {}}
    fake.dashboards["ddpdebug-overview"] = foreign
    fake.dashboards["ddpdebug-fleet"] = {"dashboard": {"tags": ["ddpdebug"]}, "meta": {"provisioned": True}}
    words = ["dashboards", "push", "--url", fake.url, "--token-file", str(file)]
    assert main(words) == 1
    message = capsys.readouterr().err
    assert "did not make" in message
    assert "comes from a file" in message
    assert fake.dashboards["ddpdebug-overview"] is foreign
    assert "title" in fake.dashboards["ddpdebug-ranks"]["dashboard"]
    assert main([*words, "--force"]) == 0
    assert fake.dashboards["ddpdebug-overview"] is not foreign


def test_the_token_is_never_shown_and_never_on_the_command_line(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even when Grafana repeats it."""
    monkeypatch.setenv("GRAFANA_TOKEN", "wrong-secret")
    assert main(["dashboards", "push", "--url", fake.url]) == 1
    shown = capsys.readouterr()
    assert "refused" in shown.err
    assert "wrong-secret" not in shown.err + shown.out
    monkeypatch.delenv("GRAFANA_TOKEN")
    assert main(["dashboards", "push", "--url", fake.url]) == 2
    assert main(["dashboards", "push", "--url", fake.url, "--token", "x"]) == 2


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://x", "http://", "http://user:secret@host"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError):
        Grafana(url, TOKEN)


def test_a_real_grafana_takes_all_and_gives_it_back(request: pytest.FixtureRequest) -> None:
    """Behind --grafana-url; the token is that of GRAFANA_TOKEN."""
    url = request.config.getoption("--grafana-url")
    if not url:
        pytest.skip("no --grafana-url")
    import os

    grafana = Grafana(url, os.environ["GRAFANA_TOKEN"])
    for name, dashboard in shipped().items():
        grafana.push(dashboard)
        back = grafana._call("GET", f"/dashboards/uid/ddpdebug-{name}")["dashboard"]
        assert [panel["title"] for panel in back["panels"]] == [panel["title"] for panel in dashboard["panels"]]
    with pytest.raises(GrafanaError):
        Grafana(url, "wrong").push(shipped()["fleet"])
