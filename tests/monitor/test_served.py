"""What serves a rank beside it: also while it dies, what it came to when it has gone, and nobody waits for that."""

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
from typing import Any

import pytest
import torch
from machine import free_port, until
from prometheus_client.parser import text_string_to_metric_families

import ddpdebug
from ddpdebug.companion.owner import Owner
from ddpdebug.config.settings import Config
from ddpdebug.monitor.served import Host, Served, settings_of
from ddpdebug.processes.beside import knock
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Met, RunEnded, RunStarted, StepJudged, Trouble
from ddpdebug.sinks.prometheus.listening import ask_to_leave

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has what it needs"),
]

#: A rank without torch: it serves, tells its address, and ends as it is told.
_RANK = """
import json, os, sys
from pathlib import Path
from ddpdebug.config.settings import Config
from ddpdebug.monitor.served import Host, Served, settings_of
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, Met, RunEnded, RunStarted, StepJudged
from ddpdebug.sinks.fanout import Fanout

told = json.loads(sys.argv[1])
password = told.get("password")
config = Config(
    metrics_port=told.get("port", 0),
    linger=told.get("linger", 600.0),
    push_outcome=told.get("push"),
    sd_dir=Path(told["sd"]),
    metrics_password_file=password and Path(password),
)
sink = Served(Host(), settings_of(config, 0, frozenset(), contained=told.get("contained", False)))
try:
    print("child", os.wait())
except ChildProcessError:
    print("no child")
assert sink.open()
run = Path(told["sd"]).parent / "run"
sink.log = run
sinks = Fanout([RunDirectory(run, 0), sink])
sinks.write(RunStarted(run_id=told.get("run_id", 'r"1'), rank=0, world=2, directory=None, config={}, versions={},
                       metrics_url=sink.url, name="train"))

def step(number):
    rows = {0: Row(rank=0, step=number, loss=1.0)}
    sinks.write(StepJudged(step=Step(step=number, optimizer=0, world=1, rows=rows)))

step(7)
grave = Finding(code="NUM305", severity=Severity.CRITICAL, title="t", id="NUM305-1", step=7)
sinks.write(FindingRaised(finding=grave))
print(sink.url, flush=True)
for line in sys.stdin:
    if not line.strip():
        break
    exec(line)
    print("done", flush=True)
exec(told["end"])
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
        (self.keeper,) = until(lambda: keepers(self.process.pid))

    def do(self, line: str) -> None:
        """Let it do something."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self, number: int | None = None) -> int:
        """Let it end, or end it by a signal; return its exit status when its output is closed."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate("\n" if number is None else None, timeout=600)
        assert output == ""
        return self.process.returncode

    def page(self) -> dict[str, tuple[dict[str, str], float]]:
        """Scrape: name -> labels and value of the last series of the name."""
        return _page(self.url)

    def is_ill(self) -> bool:
        """Scrape: whether what it has found is known."""
        return self.page()["ddpdebug_run_state"][1] == 2

    def state(self) -> tuple[float, str, str] | None:
        """Scrape: state, outcome and cause; None while it has no end, and while nobody answers."""
        found = {}
        with suppress(OSError):
            found = self.page()
        if "ddpdebug_run_outcome_info" not in found:
            return None
        labels = found["ddpdebug_run_outcome_info"][0]
        return found["ddpdebug_run_state"][1], labels["outcome"], labels["cause"]

    def files(self) -> list[Path]:
        """Return the target files."""
        return list(self.targets.iterdir()) if self.targets.is_dir() else []


def _page(url: str) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


#: Processes beside this one that tests of other files have left.
_OTHERS: set[int] = set()


@pytest.fixture(autouse=True)
def _of_others() -> None:
    _OTHERS.clear()
    _OTHERS.update(keepers(os.getpid()))


def keepers(pid: int) -> list[int]:
    """Return the keepers of a process."""
    found = list[int]()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if any(b"ddpdebug.companion.process" in word and f", {pid})".encode() in word for word in words):
                found.append(int(entry.parent.name))
    return [each for each in found if each not in _OTHERS]


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return bool(int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16) >> (number - 1) & 1)
    return False


def has_gone(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has reaped yet has."""
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
    assert until(rank.is_ill)
    (file,) = rank.files()
    assert rank.end(number) == status
    assert file.exists()
    assert until(rank.state) == state
    found = rank.page()
    for name in ("findings_total", "incident_step", "run_info", "run_state", "run_end_timestamp_seconds"):
        assert found[f"ddpdebug_{name}"][0]["run_id"] == 'r"1'
        assert found[f"ddpdebug_{name}"][0]["run"] == "train"
    assert not found.keys() & {"ddpdebug_loss", "ddpdebug_rank_up", "ddpdebug_step", "ddpdebug_world_size"}
    assert found["ddpdebug_steps_total"][1] == 1
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


def test_one_that_was_killed_is_started_again_and_serves_again(start: Callable[..., Rank]) -> None:
    """At the same address, with what was counted before; the end as well."""
    rank = start(_IN_ORDER.format("finished", 0))
    for number in (8, 9):
        os.kill(rank.keeper, signal.SIGKILL)
        assert until(lambda: has_gone(rank.keeper))
        rank.do(f"step({number})")

        def again() -> list[int]:
            rank.do("sinks.write(Met(members=(0,)))")  # as every few seconds: the first one may just not see it yet
            return keepers(rank.process.pid)

        (rank.keeper,) = until(again)

        def look(number: int = number) -> bool:
            with suppress(OSError):
                return rank.page()["ddpdebug_step"][1] == number
            return False

        assert until(look)
        found = rank.page()
        assert found["ddpdebug_steps_total"][1] == number - 6
        assert rank.is_ill()
    os.kill(rank.keeper, signal.SIGKILL)
    assert until(lambda: has_gone(rank.keeper))
    (rank.keeper,) = until(again)
    assert rank.end() == 0
    assert until(rank.state) == (0, "findings", "NUM305")
    (rank.keeper,) = keepers(rank.process.pid)


def test_one_that_is_stopped_keeps_nobody(start: Callable[..., Rank]) -> None:
    """What it cannot take goes on as it goes on."""
    rank = start("for number in range(8, 2000): step(number)\n" + _IN_ORDER.format("finished", 0))
    os.kill(rank.keeper, signal.SIGSTOP)
    assert rank.end() == 0
    os.kill(rank.keeper, signal.SIGCONT)
    assert until(rank.state)[0] == 0


def test_who_is_asked_to_end_with_its_rank_does_not_stay(start: Callable[..., Rank]) -> None:
    """A service manager that stops a whole group waits for all of it."""
    rank = start("")
    os.kill(rank.keeper, signal.SIGTERM)
    assert until(rank.is_ill)
    assert not has_gone(rank.keeper)
    assert rank.end(signal.SIGKILL) == -signal.SIGKILL
    assert until(rank.state) == (3, "cancelled", "SIGKILL")
    assert until(lambda: has_gone(rank.keeper))
    assert rank.files() == []


def test_where_nothing_outlives_a_job_nothing_is_left_for_later(start: Callable[..., Rank]) -> None:
    """A file that nobody can remove any more would be an alarm about a run that ended well."""
    rank = start(_IN_ORDER.format("finished", 0), contained=True)
    assert rank.end() == 0
    assert rank.files() == []
    killed = start("", contained=True)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    assert until(killed.state) == (5, "lost", "SIGKILL")


@pytest.mark.smoke
def test_a_run_on_the_same_port_gets_it(start: Callable[..., Rank]) -> None:
    """The old one's end moves elsewhere, where its target file says so."""
    port = free_port()
    old = start("", port=port)
    assert f":{port}/" in old.url
    old.end(signal.SIGKILL)
    assert until(old.state)[0] == 5
    new = start("", port=port, run_id="new")
    assert new.url == old.url
    assert until(new.is_ill)
    addresses = {file.name: json.loads(file.read_text())[0]["targets"][0] for file in new.files()}
    assert addresses.pop("ddpdebug-new-0.json") == f"127.0.0.1:{port}"
    ((_, moved),) = addresses.items()
    old.url = f"http://{moved}/metrics"
    assert until(old.state)[0] == 5
    assert not ask_to_leave(port)


def test_the_same_run_on_the_same_port_keeps_its_file(start: Callable[..., Rank]) -> None:
    """A rank that an elastic launcher starts again has the name of the one that was killed."""
    port = free_port()
    old = start("", port=port)
    old.end(signal.SIGKILL)
    assert until(old.state)[0] == 5  # by then its keeper can be asked for the port
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


def _served(**options: Any) -> Served:
    return Served(Host(), settings_of(Config(**options), 0, frozenset(), contained=False))


def _opens(door: str) -> bool:
    with suppress(OSError):
        knock(door, 0.0).close()
        return True
    return False


@pytest.mark.smoke
def test_the_ranks_of_a_node_have_one_process(tmp_path: Path) -> None:
    """Each its own address; the first sends the steps of all, and a rank that goes on without it its own."""
    hosts = Host(), Host()
    hosts[1].joins = f"test-{os.getpid()}"
    log = RunDirectory(tmp_path, 0)

    def step(number: int, *ranks: int) -> None:
        rows = {rank: Row(rank=rank, step=number, loss=1.0) for rank in ranks}
        record = StepJudged(step=Step(step=number, optimizer=0, world=2, rows=rows))
        log.write(record)
        for rank in ranks:
            served[rank].write(record)

    def steps(rank: int) -> dict[str, float]:
        with suppress(OSError):
            found = _page(str(served[rank].url))
            return {found[f"ddpdebug_{name}"][0]["rank"]: found[f"ddpdebug_{name}"][1] for name in ("steps_total",)}
        return {}

    served = list[Served]()
    for rank, host in enumerate(hosts):
        served.append(Served(host, settings_of(Config(), rank, frozenset(), contained=False)))
        assert served[rank].open()
        served[rank].log = tmp_path
        if rank == 0:
            served[0].let_in(str(hosts[1].joins), 0)
            assert until(lambda: _opens(str(hosts[1].joins)))
    for rank in range(2):
        url = served[rank].url
        record = RunStarted(run_id="r", rank=rank, world=2, directory=tmp_path, config={}, versions={}, metrics_url=url)
        log.write(record) if rank == 0 else None
        served[rank].write(record)
    try:
        step(0, 0, 1)
        assert until(lambda: steps(1) == {"1": 1})
        (process,) = keepers(os.getpid())
        os.kill(process, signal.SIGKILL)
        assert until(lambda: has_gone(process))
        step(1, 0, 1)
        assert until(lambda: served[0].write(Met(members=(0, 1))) or steps(0) == {"0": 2})
        step(2, 0, 1)
        assert until(lambda: steps(1) == {"1": 3})
        assert steps(0) == {"0": 3}
        served[0].write(RunEnded(reason="finished", exit_code=0, steps={}))
        step(3, 1)
        assert until(lambda: steps(1) == {"1": 4})
    finally:
        for each, host in zip(served, hosts, strict=True):
            each.close()
            host.close()
    assert until(lambda: not keepers(os.getpid()))


def test_where_no_process_can_be_started_that_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says so."""
    before = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    served = _served()
    with pytest.raises(OSError, match="does not answer"):
        served.open()
    served._host.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_host_that_is_not_ours_has_no_address() -> None:
    """Nothing is served there, and the process has nothing to stay for."""
    served = _served(metrics_host="203.0.113.1")
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        served.open()
    served._host.close()
    assert until(lambda: not keepers(os.getpid()))


def test_a_child_of_the_rank_says_nothing() -> None:
    """After a fork it has the connection too, and starts no process in the place of one that it cannot use."""
    served = _served()
    assert served.open()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        served.write(Trouble(part="x", message="of the child"))
        os._exit(len(keepers(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    served.write(Trouble(part="x", message="of the rank"))
    (process,) = keepers(os.getpid())
    served._host.close()
    assert until(lambda: has_gone(process))


def test_a_port_that_no_keeper_has_is_not_waited_for() -> None:
    """Somebody else's stays his."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert not ask_to_leave(other.getsockname()[1])


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
        code = "from ddpdebug.config.settings import Config\n"
        code += "from ddpdebug.monitor.served import Host, Served, settings_of\n"
        code += f"told = settings_of(Config(push_outcome={push!r}), 0, frozenset(), contained=False)\n"
        code += "served = Served(Host(), told)\nprint(1, flush=True)\ninput()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        (keeper,) = until(lambda: keepers(process.pid))
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
    assert until(rank.state)[:2] == (3, "cancelled")


def test_the_standard_library_comes_before_what_lies_beside_ddpdebug(tmp_path: Path) -> None:
    """Packages that replace a module of an older Python lie there."""
    package = Path(ddpdebug.__file__).parent
    (tmp_path / "ddpdebug").symlink_to(package)
    (tmp_path / "signal.py").write_text("raise ImportError('not this one')\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from ddpdebug.monitor.served import Host\nhost = Host()\nhost.judge()\nprint(1, flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    (keeper,) = until(lambda: keepers(process.pid))
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
        assert Owner(high, child).has_gone()
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
    (keeper,) = until(lambda: {*keepers(os.getpid())} - {*before})
    monitor.close()
    assert until(lambda: has_gone(keeper))
