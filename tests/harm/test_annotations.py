"""A job whose findings go to a Grafana that is silent or down: it ends as without, and the findings arrive later."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ddpdebug.commands import main

pytest.importorskip("grafana_api")

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

TOKEN = "glsa_secret"


class Grafana:
    """Takes annotations; until it is told to `work`, it answers nothing, or hangs up."""

    def __init__(self, *, silent: bool) -> None:
        self.working = threading.Event()
        self.ended = threading.Event()
        self.asked = 0
        self.annotations: list[dict[str, Any]] = []
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def begin(self) -> bool:
                grafana.asked += 1
                if not grafana.working.is_set():
                    if silent:
                        grafana.ended.wait(600)
                    with suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return False
                assert self.headers["Authorization"] == f"Bearer {TOKEN}"
                return True

            def answer(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.begin():
                    wanted = set(parse_qs(urlsplit(self.path).query)["tags"])
                    self.answer([each for each in grafana.annotations if wanted <= set(each["tags"])])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.begin():
                    grafana.annotations.append(body)
                    self.answer({"id": len(grafana.annotations)})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Let go of everybody who waits."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(params=["silent", "hangs up"])
def grafana(request: pytest.FixtureRequest) -> Iterator[Grafana]:
    """Serve on any port."""
    made = Grafana(silent=request.param == "silent")
    yield made
    made.close()


def test_a_job_ends_as_without_it_and_its_findings_arrive_later(
    grafana: Grafana,
    run_jobs: Callable[..., Any],
    compare: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The finding is raised by the job's last step; Grafana answers nobody while any of it lives."""
    run = tmp_path / "run"
    options = ["--metrics", "off", "--out", str(run), "--every-step", "--grafana-url", grafana.url]
    job = {"script": "last_steps.py", "args": ["main", "edit"], "env": {"GRAFANA_TOKEN": TOKEN}}
    plain, watched = run_jobs([{**job, "options": None}, {**job, "options": options}])
    assert compare(plain, watched) == []
    assert grafana.asked >= 1
    assert grafana.annotations == []
    findings = [json.loads(line) for line in (run / "findings.jsonl").read_text().splitlines()]
    assert "RANK101" in [finding["code"] for finding in findings]
    assert f"ddpdebug annotations flush {run}" in " ".join(rank["err"] for rank in watched)
    files = [Path(folder) / name for folder, _, names in os.walk(run) for name in names]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    grafana.working.set()
    for sent in (len(findings), 0):
        assert main(["annotations", "flush", str(run)]) == 0
        assert f"{sent} annotations sent" in capsys.readouterr().out
    assert [each["text"].partition(":")[0] for each in grafana.annotations] == [each["code"] for each in findings]
    assert all(each["time"] > 1_600_000_000_000 for each in grafana.annotations)
