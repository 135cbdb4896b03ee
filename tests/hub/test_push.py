"""Pushing: a process beside the rank brings the run to the hub, whatever becomes of the rank or of the hub."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from machine import until

from ddpdebug.commands import main
from ddpdebug.hub.app import create
from ddpdebug.hub.auth import Auth
from ddpdebug.hub.store import Store
from ddpdebug.processes.beside import Channel
from ddpdebug.processes.pusher import Post, RefusedError, _Process
from ddpdebug.run_directory.mirror import Mirror, is_document
from tests.hub.runs import MadeUp, Site, finding, serving

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has what it needs")

TOKEN = "t" * 20
#: A rank 0 without torch: it writes a run directory, has it pushed, and does what it is told line by line.
_RANK = """
import json, os, sys
from pathlib import Path
from ddpdebug.monitor.served import HubSink, Pusher
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, RunEnded, RunStarted, StepJudged

settings = json.loads(sys.argv[1])
directory, troubles = Path(settings.pop("directory")), []
contained = settings.pop("contained", False)
pusher = Pusher()
try:
    print("child", os.wait())
except ChildProcessError:
    print("no child")
sinks = [RunDirectory(directory, 0), HubSink(pusher, directory, settings, contained=contained, tell=troubles.append)]

def write(record):
    for sink in sinks:
        sink.write(record)

def steps(first, last):
    for step in range(first, last):
        write(StepJudged(step=Step(step=step, optimizer=0, world=1, rows={0: Row(rank=0, step=step, loss=1.0)})))

write(RunStarted(run_id="aaaaaa", rank=0, world=1, directory=directory, config={}, versions={}, name="train",
                 time="2026-11-21T08:00:00Z", owner="somebody", scheduler_job="17"))
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print([each.message for each in troubles], flush=True)
"""
_FOUND = (
    "write(FindingRaised(finding=Finding(code='NUM305', severity=Severity.CRITICAL, title='t', id='NUM305-1', step=1)))"
)
_END = "write(RunEnded(reason='finished', exit_code=0, steps={0: 3}))"
KEY = MadeUp().key


class Rank:
    """A process with a pusher."""

    def __init__(self, directory: Path, url: str, **settings: object) -> None:
        self.directory = directory
        told = {"directory": str(directory), "url": url, "token": "", "token_file": "", **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "no child\n"
        assert self.process.stdout.readline() == "ready\n"

    def do(self, line: str) -> list[str]:
        """Let it do something; return what has been said about the hub."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline().replace("'", '"'))
        assert isinstance(found, list)
        return found

    def leave(self) -> None:
        """Let it end."""
        self.process.communicate(timeout=600)

    def pushers(self) -> list[int]:
        """Return the processes that hold the run directory open and are not the rank."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/fd"):
            with suppress(OSError):
                if int(entry.parent.name) != self.process.pid and any(
                    one.readlink() == self.directory for one in entry.iterdir()
                ):
                    found.append(int(entry.parent.name))
        return found


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Return what starts a rank; what is left of them is ended."""
    started: list[Rank] = []

    def start(url: str, **settings: object) -> Rank:
        started.append(Rank(tmp_path / f"run{len(started)}", url, **settings))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        for pid in one.pushers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def hub(tmp_path: Path, auth: Auth | None = None) -> Iterator[tuple[Site, Store]]:
    """Serve a hub."""
    store = Store(tmp_path / "hub.sqlite")
    with serving(create(store, auth or Auth())) as site:
        yield site, store
    store.close()


@contextmanager
def other_server(
    answer: Callable[[http.server.BaseHTTPRequestHandler], None],
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve something that is no hub; yields its address and the headers of what it was asked."""
    heard: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append({"path": self.path, **dict(self.headers)})
            answer(self)

        do_GET = do_POST  # noqa: N815 - as the server calls it

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", heard
        server.shutdown()


def equal(store: Store, directory: Path) -> bool:
    """Return whether a store has what a run directory has."""
    paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return all(
        store.content(KEY, name) == path.read_bytes() for name, path in paths.items() if is_document(name) is not None
    )


def state(store: Store) -> str:
    """Return the state of the run, empty while there is none."""
    return next((run["state"] for run in store.runs()), "")


@pytest.mark.smoke
def test_live_and_to_the_end(tmp_path: Path, rank: Callable[..., Rank]) -> None:
    """The hub has the run while it goes on and when it has ended, and then the process beside it goes."""
    with hub(tmp_path) as (site, store):
        one = rank(site.address)
        one.do("steps(0, 3)")
        assert until(lambda: store.runs() and store.runs()[0]["last_step"] == 2)
        assert state(store) == "running"
        one.do(_FOUND)
        assert until(lambda: state(store) == "ill")
        assert one.do(_END) == []
        one.leave()
        assert until(lambda: state(store) == "finished")
        assert until(lambda: not one.pushers())
        assert equal(store, one.directory)
        run = store.runs()[0]
        assert (run["name"], run["owner"], run["job"]) == ("train", "somebody", "17")


@pytest.mark.smoke
def test_killed_rank(tmp_path: Path, rank: Callable[..., Rank]) -> None:
    """What a rank had written before it was killed comes to the hub, which then says that it is lost."""
    with hub(tmp_path) as (site, store):
        one = rank(site.address)
        one.do("steps(0, 30)")
        one.do(_FOUND)
        assert until(one.pushers)
        one.process.kill()
        assert until(lambda: not one.pushers())
        assert equal(store, one.directory)
        heard = store.runs()[0]["last_seen"]
        for passed in range(32):
            store.clock = lambda passed=passed: heard + passed  # type: ignore[misc]
            store.look_again()
        assert state(store) == "lost"


def test_contained_rank(tmp_path: Path, rank: Callable[..., Rank]) -> None:
    """Where nothing outlives the rank, the hub has its end before it goes."""
    with hub(tmp_path) as (site, store):
        one = rank(site.address, contained=True)
        one.do("steps(0, 3)")
        assert until(lambda: state(store) == "running")
        one.do(_END)
        assert until(lambda: state(store) == "finished")


@pytest.mark.smoke
def test_hub_that_comes_later(tmp_path: Path, rank: Callable[..., Rank]) -> None:
    """A hub that is not there is said to once, and has everything when it comes."""
    with other_server(lambda _: None) as (url, _):
        pass  # nobody listens there any more
    one = rank(url)
    said = until(lambda: one.do("steps(0, 1)"), pause=1.1)
    assert len(said) == 1
    assert f"the hub at {url} does not take the run: " in said[0]
    assert f"later: ddpdebug hub push {one.directory}" in said[0]
    for _ in range(3):
        assert one.do("import time; time.sleep(1.1); steps(0, 1)") == said
    one.do(_END)
    one.leave()
    with hub(tmp_path) as (site, store):
        assert main(["hub", "push", str(one.directory), "--hub", site.address]) == 0
        assert equal(store, one.directory)
        assert main(["hub", "push", str(one.directory), "--hub", site.address]) == 0


@pytest.mark.smoke
def test_token(tmp_path: Path, rank: Callable[..., Rank]) -> None:
    """A token that is refused is said to once; one from a file is read each time, so that it may be mended."""
    file = tmp_path / "token"
    file.write_text("not the token of the hub\n")
    with hub(tmp_path, Auth(TOKEN)) as (site, store):
        one = rank(site.address, token_file=str(file))
        said = until(lambda: one.do("steps(0, 1)"), pause=1.1)
        assert len(said) == 1
        assert "401" in said[0]
        assert "not the token" not in said[0]
        file.write_text(TOKEN + "\n")
        assert until(lambda: state(store) == "running")
        other = rank(site.address, token=TOKEN)
        assert other.do("steps(0, 1)") == []


@pytest.mark.parametrize("answer", ["silence", "nonsense", "redirect", "gone"])
def test_what_is_no_hub(tmp_path: Path, rank: Callable[..., Rank], answer: str) -> None:
    """Whatever answers in the place of a hub reaches nothing of the rank, and gets no token that is not for it."""
    let_go = threading.Event()
    with other_server(lambda one: _send(one, 200, b'{"files": {}}')) as (elsewhere, stolen):

        def reply(one: http.server.BaseHTTPRequestHandler) -> None:
            if answer == "silence":
                let_go.wait(600)
            elif answer == "redirect":
                _send(one, 302, b"", Location=elsewhere + "/x")
            else:
                _send(one, 410 if answer == "gone" else 200, b"\xff[[{" * 1000)

        with other_server(reply) as (url, heard):
            one = rank(url, token=TOKEN)
            assert one.do("steps(0, 3)") == []
            assert until(lambda: heard)
            assert heard[0]["Authorization"] == f"Bearer {TOKEN}"
            one.do(_END)
            one.leave()
            assert one.process.returncode == 0
            if answer == "gone":
                assert until(lambda: not one.pushers())
            let_go.set()
        assert stolen == []


def _send(one: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    one.rfile.read(int(one.headers.get("Content-Length", 0)))
    one.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        one.send_header(name, value)
    one.end_headers()
    one.wfile.write(body)


def test_deleted_run(tmp_path: Path) -> None:
    """A run that the hub has deleted is refused for good."""
    with hub(tmp_path) as (site, store):
        post = Post(site.address, KEY, lambda: "")
        post.send([])
        store.delete(KEY)
        with pytest.raises(RefusedError, match="410 the run was deleted") as refused:
            post.send([])
        assert refused.value.for_good


def test_push_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ddpdebug hub push` says what is wrong with the directory, the address or the hub."""
    directory = MadeUp(findings=[finding()]).write(tmp_path / "run")
    assert main(["hub", "push", str(tmp_path)]) == 2
    assert "cannot push" in capsys.readouterr().err
    assert main(["hub", "push", str(directory)]) == 2
    assert "was not told of a hub" in capsys.readouterr().err
    assert main(["hub", "push", str(directory), "--hub", "file:///etc/passwd"]) == 2
    assert "http://" in capsys.readouterr().err
    assert main(["hub", "push", str(directory), "--hub", "http://127.0.0.1:9"]) == 1
    assert "does not take the run" in capsys.readouterr().err


def test_hub_that_trickles(rank: Callable[..., Rank]) -> None:
    """A hub that answers a byte at a time does not keep the process when all of the job is being ended."""
    let_go = threading.Event()

    def reply(one: http.server.BaseHTTPRequestHandler) -> None:
        one.send_response(200)
        one.send_header("Content-Length", "100000")
        one.end_headers()
        with suppress(OSError):
            while not let_go.wait(0.2):
                one.wfile.write(b" ")

    with other_server(reply) as (url, heard):
        one = rank(url)
        assert until(lambda: heard)
        (pid,) = until(one.pushers)
        os.kill(pid, signal.SIGTERM)
        assert until(lambda: not one.pushers())
        let_go.set()


@pytest.mark.parametrize(("status", "again"), [(410, False), (404, True)])
def test_what_is_said_of_a_refusal(rank: Callable[..., Rank], status: int, again: bool) -> None:
    """A run that is refused for good is not said to be tried again; an address that may be mended is."""
    with other_server(lambda one: _send(one, status, b"{}")) as (url, _):
        one = rank(url)
        (said,) = until(lambda: one.do("steps(0, 1)"), pause=1.1)
        assert str(status) in said
        assert ("tried again" in said) is again
        assert bool(one.pushers()) is again or until(lambda: not one.pushers())


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that is not there is said to after the first push: the job may be a short one."""
    with other_server(lambda _: None) as (url, _):
        pass
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # these are the test's
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    process, mirror = _Process(theirs, -1), Mirror(MadeUp().write(tmp_path / "run"))
    process._facts = {"directory": "d"}
    assert not process._push(mirror, Post(url, KEY, lambda: ""))
    assert "does not take the run" in json.loads(ours.receive() or b"")["trouble"]
    mirror.close()
    for each in (ours, theirs):
        each.close()
