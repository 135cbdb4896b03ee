"""The keeper: what a rank came to is served when it has gone, and nobody waits for that."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from machine import free_port, until
from prometheus_client.parser import text_string_to_metric_families

import ddpdebug
from ddpdebug.processes.linger import Keeper, _has_gone, ask_to_leave

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has what it needs"),
]

#: A rank without torch: it serves, tells its address, and ends as it is told.
_RANK = """
import json, os, sys
from pathlib import Path
from ddpdebug.processes.linger import Keeper, ask_to_leave
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, RunEnded, RunStarted, StepJudged
from ddpdebug.sinks.fanout import Fanout
from ddpdebug.sinks.prometheus.discovery import Discovery
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
from ddpdebug.sinks.prometheus.server import Serving

settings = json.loads(sys.argv[1])
keeper = Keeper(settings.get("linger", 600.0), settings.get("push"), contained=settings.get("contained", False))
try:
    print("child", os.wait())
except ChildProcessError:
    print("no child")
password = settings.get("password")
serving = Serving(keeper=keeper, ask=ask_to_leave, password_file=password and Path(password))
sink = PrometheusSink(0, "127.0.0.1", settings.get("port", 0), serving=serving)
sinks = Fanout([sink, Discovery(Path(settings["sd"]), keeper)])
sinks.write(RunStarted(run_id=settings.get("run_id", 'r"1'), rank=0, world=2, directory=None, config={}, versions={},
                       metrics_url=sink.url, name="train"))
sinks.write(StepJudged(step=Step(step=7, optimizer=0, world=1, rows={0: Row(rank=0, step=7, loss=1.0)})))
grave = Finding(code="NUM305", severity=Severity.CRITICAL, title="t", id="NUM305-1", step=7)
sinks.write(FindingRaised(finding=grave))
print(sink.url, flush=True)
sys.stdin.readline()
exec(settings["end"])
"""
_IN_ORDER = "sinks.write(RunEnded(reason={!r}, exit_code={}, steps={{}})); sinks.close()"


class Rank:
    """A process with a keeper; its output is read through pipes, as `$(...)` does."""

    def __init__(self, folder: Path, end: str, **settings: object) -> None:
        self.targets = folder / "sd"
        words = [sys.executable, "-c", _RANK, json.dumps({"sd": str(self.targets), "end": end, **settings})]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self.children = self.process.stdout.readline().strip()
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), self.process.communicate()[0]
        (self.keeper,) = keepers(self.process.pid)

    def end(self, number: int | None = None) -> int:
        """Let it end, or end it by a signal; return its exit status when its output is closed."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate("\n" if number is None else None, timeout=600)
        assert output == ""
        return self.process.returncode

    def page(self) -> dict[str, tuple[dict[str, str], float]]:
        """Scrape: name -> labels and value of the last series of the name."""
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}

    def state(self) -> tuple[float, str, str]:
        """Scrape: state, outcome and cause."""
        found = self.page()
        labels = found["ddpdebug_run_outcome_info"][0]
        return found["ddpdebug_run_state"][1], labels["outcome"], labels["cause"]

    def files(self) -> list[Path]:
        """Return the target files."""
        return list(self.targets.iterdir()) if self.targets.is_dir() else []


def keepers(pid: int) -> list[int]:
    """Return the keepers of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if any(b"ddpdebug.processes.linger" in word and f", {pid}, ".encode() in word for word in words):
                found.append(int(entry.parent.name))
    return found


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return bool(int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16) >> (number - 1) & 1)
    return False


def has_gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody has reaped yet has."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Start ranks; end them and their keepers with the test."""
    started: list[Rank] = []

    def make(end: str, **settings: object) -> Rank:
        started.append(Rank(tmp_path, end, **settings))
        return started[-1]

    yield make
    for rank in started:
        rank.process.kill()
        for pipe in (rank.process.stdin, rank.process.stdout):
            assert pipe is not None
            pipe.close()
        rank.process.wait()
        with suppress(ProcessLookupError):
            if rank.keeper in keepers(rank.process.pid):
                os.kill(rank.keeper, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "number", "status", "state"),
    [
        (_IN_ORDER.format("finished", 0), None, 0, (0, "findings", "NUM305")),
        (_IN_ORDER.format("exception: ValueError: x", 1) + "; sys.exit(1)", None, 1, (4, "failed", "ValueError")),
        (_IN_ORDER.format("exception: FindingError: NUM305", 1) + "; sys.exit(1)", None, 1, (4, "findings", "NUM305")),
        (_IN_ORDER.format("interrupted", 130) + "; sys.exit(130)", None, 130, (3, "cancelled", "SIGINT")),
        ("", signal.SIGTERM, -signal.SIGTERM, (3, "cancelled", "SIGTERM")),
        ("", signal.SIGKILL, -signal.SIGKILL, (5, "lost", "SIGKILL")),
        ("os._exit(7)", None, 7, (4, "failed", "")),
        ("if os.fork() == 0: import time; os.close(1); os.close(2); time.sleep(3); os._exit(0)\nos.abort()", None,
         -signal.SIGABRT, (5, "lost", "SIGABRT")),
    ],
    ids=["finished", "exception", "finding", "interrupted", "sigterm", "sigkill", "exit", "abort-with-a-child"],
)  # fmt: skip
def test_the_end_is_served_when_the_rank_has_gone(
    start: Callable[..., Rank], end: str, number: int | None, status: int, state: tuple[float, str, str]
) -> None:
    """With its exit status and its output closed; from the same address, until it was seen twice, and no longer."""
    rank = start(end)
    assert rank.children == "no child"
    assert rank.page()["ddpdebug_run_state"][1] == 2
    (file,) = rank.files()
    assert rank.end(number) == status
    assert file.exists()
    assert rank.state() == state
    found = rank.page()
    for name in ("findings_total", "incident_step", "run_info", "run_state", "run_end_timestamp_seconds"):
        assert found[f"ddpdebug_{name}"][0]["run_id"] == 'r"1'
        assert found[f"ddpdebug_{name}"][0]["run"] == "train"
    assert not found.keys() & {"ddpdebug_loss", "ddpdebug_rank_up", "ddpdebug_step", "ddpdebug_world_size"}
    assert ("ddpdebug_steps_total" in found) is ("sinks" in end)
    with urllib.request.urlopen(rank.url.replace("/metrics", "/sd"), timeout=60) as answer:
        assert json.load(answer) == [{"targets": [rank.url.split("/")[2]], "labels": {}}]

    def look() -> bool:
        with suppress(OSError):
            rank.page()
        return has_gone(rank.keeper)

    assert until(look, pause=0.3)
    assert rank.files() == []


def test_nothing_is_served_for_longer_than_was_asked_for(start: Callable[..., Rank]) -> None:
    """Also where nobody ever asks."""
    rank = start(_IN_ORDER.format("finished", 0), linger=1.0)
    assert rank.end() == 0
    assert until(lambda: has_gone(rank.keeper))
    assert rank.files() == []


def test_a_keeper_that_was_killed_keeps_nobody(start: Callable[..., Rank]) -> None:
    """The rank ends as without one: nothing is left of it."""
    rank = start(_IN_ORDER.format("finished", 0))
    os.kill(rank.keeper, signal.SIGKILL)
    assert until(lambda: has_gone(rank.keeper))
    assert rank.page()["ddpdebug_run_state"][1] == 2
    assert rank.end() == 0
    assert rank.files() == []
    with pytest.raises(OSError):
        rank.page()


def test_a_keeper_that_is_stopped_keeps_nobody(start: Callable[..., Rank]) -> None:
    """What it cannot take is dropped."""
    rank = start("for _ in range(5000): sink._hand_over()\n" + _IN_ORDER.format("finished", 0))
    os.kill(rank.keeper, signal.SIGSTOP)
    assert rank.end() == 0
    assert rank.files() == []


def test_who_is_asked_to_end_with_its_rank_does_not_stay(start: Callable[..., Rank]) -> None:
    """A service manager that stops a whole group waits for all of it."""
    rank = start("")
    os.kill(rank.keeper, signal.SIGTERM)
    assert rank.page()["ddpdebug_run_state"][1] == 2
    assert not has_gone(rank.keeper)
    assert rank.end(signal.SIGKILL) == -signal.SIGKILL
    assert rank.state() == (3, "cancelled", "SIGKILL")
    assert until(lambda: has_gone(rank.keeper))
    assert rank.files() == []


def test_where_nothing_outlives_a_job_nothing_is_left_for_later(start: Callable[..., Rank]) -> None:
    """A file that nobody can remove any more would be an alarm about a run that ended well."""
    rank = start(_IN_ORDER.format("finished", 0), contained=True)
    assert rank.end() == 0
    assert rank.files() == []
    killed = start("", contained=True)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    assert killed.state() == (5, "lost", "SIGKILL")


@pytest.mark.smoke
def test_a_run_on_the_same_port_gets_it(start: Callable[..., Rank]) -> None:
    """The old one's end moves elsewhere, where its target file says so."""
    port = free_port()
    old = start("", port=port)
    assert f":{port}/" in old.url
    old.end(signal.SIGKILL)
    assert until(lambda: old.state()[0] == 5)
    new = start("", port=port, run_id="new")
    assert new.url == old.url
    assert new.page()["ddpdebug_run_state"][1] == 2
    addresses = {file.name: json.loads(file.read_text())[0]["targets"][0] for file in new.files()}
    assert addresses.pop("ddpdebug-new-0.json") == f"127.0.0.1:{port}"
    ((_, moved),) = addresses.items()
    old.url = f"http://{moved}/metrics"
    assert old.state()[0] == 5
    assert not ask_to_leave(port)


def test_the_same_run_on_the_same_port_keeps_its_file(start: Callable[..., Rank]) -> None:
    """A rank that an elastic launcher starts again has the name of the one that was killed."""
    port = free_port()
    old = start("", port=port)
    old.end(signal.SIGKILL)
    assert until(lambda: old.state()[0] == 5)  # by then its keeper can be asked for the port
    new = start("", port=port)
    assert new.url == old.url
    os.kill(old.keeper, signal.SIGTERM)
    assert until(lambda: has_gone(old.keeper))
    (file,) = new.files()
    assert json.loads(file.read_text())[0]["targets"] == [f"127.0.0.1:{port}"]


def test_a_rank_that_becomes_another_program_leaves_nothing(start: Callable[..., Rank]) -> None:
    """It is not this run any more."""
    rank = start("os.execv('/bin/sleep', ['sleep', '600'])")
    assert rank.process.stdin is not None
    rank.process.stdin.write("\n")
    rank.process.stdin.close()
    assert until(lambda: has_gone(rank.keeper))
    assert rank.process.poll() is None
    assert rank.files() == []


def test_who_does_not_know_the_password_does_not_learn_the_end(start: Callable[..., Rank], tmp_path: Path) -> None:
    """It is served as the metrics were."""
    (tmp_path / "password").write_text("me:secret\n")
    rank = start("", password=str(tmp_path / "password"))
    rank.end(signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        rank.page()
    refused.value.close()


def test_the_end_is_pushed_where_that_is_asked_for(start: Callable[..., Rank]) -> None:
    """By PUT, grouped by run and rank; a gateway that refuses changes nothing."""
    got: list[tuple[str, str]] = []

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.send_response(400)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        push = f"http://127.0.0.1:{server.server_port}/"
        rank = start(_IN_ORDER.format("exception: ValueError: x", 1), push=push, contained=True)
        assert rank.end() == 0
        assert until(lambda: got)
        server.shutdown()
    ((path, text),) = got
    assert path == "/metrics/job/ddpdebug/run_id/r%221/rank/0"
    assert 'ddpdebug_run_state{rank="0",run="train",run_id="r\\"1"} 4' in text


def test_where_no_process_can_be_started_that_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours: whoever wants a keeper goes on without."""
    before = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="did not start"):
        Keeper(1.0)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_child_of_the_rank_says_nothing() -> None:
    """After a fork it has the socket too, and perhaps a lock that nobody opens there any more."""
    keeper = Keeper(1.0)
    with keeper._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            keeper.close()
            os._exit(int(keeper.tell(page="of the child")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keeper.tell(page="of the rank")
    keeper.close()
    assert not keeper.tell(page="later")


def test_a_port_that_no_keeper_has_is_not_waited_for() -> None:
    """Somebody else's stays his."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert not ask_to_leave(other.getsockname()[1])


def test_what_is_too_long_to_be_sent_changes_nothing() -> None:
    """The targets of thousands of ranks: the keeper lives on, and gets what comes later."""
    keeper = Keeper(1.0)
    for length in (1 << 18, 1 << 22):
        assert not keeper.tell(sd="x" * length)
    assert keeper.tell(page="the rest")
    keeper.close()


def test_a_rank_that_has_told_nothing_yet_has_no_end_to_push(tmp_path: Path) -> None:
    """Killed before it knew who it is: there are no labels for that."""
    got: list[str] = []

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            got.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        push = f"http://127.0.0.1:{server.server_port}/"
        code = "from ddpdebug.processes.linger import Keeper\n"
        code += f"keeper = Keeper(60.0, {push!r})\nprint(1, flush=True)\ninput()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        (keeper,) = keepers(process.pid)
        process.kill()
        process.communicate()
        assert until(lambda: has_gone(keeper))
        server.shutdown()
    assert got == []


def test_signals_that_the_job_blocks_reach_the_keeper(start: Callable[..., Rank]) -> None:
    """A mask is inherited; a request to end is for the keeper too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        rank = start("")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(rank.keeper, signal.SIGTERM)
    rank.end(signal.SIGKILL)
    assert rank.state()[:2] == (3, "cancelled")


def test_the_standard_library_comes_before_what_lies_beside_ddpdebug(tmp_path: Path) -> None:
    """Packages that replace a module of an older Python lie there."""
    package = Path(ddpdebug.__file__).parent
    (tmp_path / "ddpdebug").symlink_to(package)
    (tmp_path / "signal.py").write_text("raise ImportError('not this one')\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from ddpdebug.processes.linger import Keeper\nkeeper = Keeper(60.0)\nprint(1, flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    (keeper,) = keepers(process.pid)
    try:
        assert until(lambda: catches(keeper, signal.SIGTERM))  # it has come to its own code
    finally:
        process.kill()
        process.communicate()


def test_the_end_of_a_rank_with_many_files_is_seen() -> None:
    """The descriptor by which it is watched has the number that it had there; `select` takes those below 1024 only."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("no more files here")
    child = os.fork()
    if child == 0:
        os._exit(0)
    fd = os.pidfd_open(child)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        assert _has_gone(high, child)
    finally:
        os.waitpid(child, 0)
        os.close(fd)
        os.close(high)


def test_a_keeper_that_nobody_took_goes_with_its_monitor(tmp_path: Path) -> None:
    """Not with the process: a notebook may watch many times. Here there is no such address to serve at."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = keepers(os.getpid())
    monitor = ddpdebug.watch(
        model, optimizer, out=tmp_path / "run", sd_dir=tmp_path / "sd", metrics_host="203.0.113.1", quiet=True
    )
    (keeper,) = set(keepers(os.getpid())) - {*before}
    monitor.close()
    assert until(lambda: has_gone(keeper))
