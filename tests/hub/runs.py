"""Run directories of made-up runs, in a store and behind a server."""

from __future__ import annotations

import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ddpdebug.hub.serve import Connection
from ddpdebug.hub.store import Store, copy_run
from ddpdebug.run_directory.mirror import Mirror
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, RunEnded, RunStarted, StepJudged, Waiting
from tests.support.machine import free_port, until


def finding(code: str = "RANK104", **fields: Any) -> Finding:
    """Return a finding as a rule makes it."""
    told: dict[str, Any] = {
        "severity": Severity.CRITICAL, "title": "optimizer settings differ between ranks", "step": 20, "last_step": 39,
        "ranks": (1,), "subject": ("lr",), "evidence": {"values": {"0": 0.1, "1": 0.2}}, "causes": ["a cause"],
        "actions": ["do this"], "id": f"{code}-1", "time": "2026-11-21T08:10:00Z",
    }  # fmt: skip
    return Finding(code=code, **{**told, **fields})


@dataclass(frozen=True)
class MadeUp:
    """A run: what it was started with, what was found, and how it ended."""

    run: str = "aaaaaa"
    time: str = "2026-11-21T08:00:00Z"
    command: Sequence[str] = ("train.py", "--lr", "0.1")
    findings: Sequence[Finding] = ()
    world: int = 2
    steps: int = 40
    node: str = "node01"
    versions: Mapping[str, str] | None = None
    waits: Waiting | None = None
    metrics_url: str | None = None
    ended: str | None = "finished"

    @property
    def key(self) -> str:
        """What the hub calls it."""
        return f"{self.time.replace('-', '').replace(':', '')}-{self.run}"

    def write(self, directory: Path) -> Path:
        """Write its run directory."""
        sink = RunDirectory(directory, 0)
        versions = {"torch": "2.13.0"} if self.versions is None else self.versions
        sink.write(RunStarted(run_id=self.run, rank=0, world=self.world, directory=directory, config={"budget": 0.01},
                              versions=versions, command=tuple(self.command), time=self.time, node=self.node,
                              metrics_url=self.metrics_url))  # fmt: skip
        for step in range(self.steps):
            rows = {
                rank: Row(rank=rank, step=step, loss=2.0 / (step + 1) + rank, step_seconds=0.2,
                          params_after_digest=Digest(5 + (rank == 1 and step >= 30)))
                for rank in range(self.world)
            }  # fmt: skip
            sink.write(StepJudged(step=Step(step=step, optimizer=0, world=self.world, rows=rows)))
        for one in self.findings:
            sink.write(FindingRaised(finding=one))
        if self.waits is not None:
            sink.write(self.waits)
        if self.ended is not None:
            sink.write(RunEnded(reason=self.ended, exit_code=0, steps={0: self.steps}))
        sink.close()
        return directory


HUNG = Waiting(state=WaitState.STUCK, ranks=(1,), location="train.py:88")


def bring(store: Store, directory: Path, source: str = "import") -> None:
    """Mirror a run directory into a store."""
    mirror = Mirror(directory)
    try:
        copy_run(store, mirror, source)
    finally:
        mirror.close()


@dataclass(frozen=True)
class Answer:
    """What a server answers."""

    status: int
    text: str
    headers: Mapping[str, str]


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Site:
    """A server and how to ask it."""

    address: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str, form: Mapping[str, str] | None = None, data: bytes | None = None) -> Answer:
        """Return the answer; a form is posted; redirects are answers too."""
        data = urllib.parse.urlencode(form).encode() if form is not None else data
        request = urllib.request.Request(
            self.address + path, data=data, headers={"Origin": self.address, **self.headers}
        )
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=600) as answer:
                return Answer(answer.status, answer.read().decode(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode(), dict(error.headers))


@contextmanager
def serving(app: ASGIApp) -> Iterator[Site]:
    """Serve an application from a thread of this process."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=Connection, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: server.started)
    try:
        yield Site(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join()
