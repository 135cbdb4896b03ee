"""`ddpdebug hub` as a process: what it says, what it refuses, and that it may be killed at any point."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from machine import until

from ddpdebug.commands import main
from ddpdebug.hub.store import Store
from ddpdebug.processes.pusher import Post, RefusedError
from ddpdebug.run_directory.mirror import Mirror
from tests.hub.runs import MadeUp, finding
from tests.hub.test_store import same

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a hub and returns its process and address."""
    started = []

    def begin(*words: str, **variables: str) -> tuple[subprocess.Popen[str], str]:
        data = ["--data", str(tmp_path / "hub.sqlite"), "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ddpdebug", "hub", *data, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"ddpdebug: hub at (http://\S+:\d+), runs in .*hub\.sqlite\n", line)
        assert found is not None, line + process.communicate()[1]
        return process, found[1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def get(url: str) -> str:
    """Return what a hub answers."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_in_order(start: Start, number: int) -> None:
    """The hub says where it is, and a signal ends it, also while somebody listens."""
    process, url = start()
    with urllib.request.urlopen(url + "/api/v1/events", timeout=600) as events:
        assert events.readline()
        process.send_signal(number)
        output, errors = process.communicate(timeout=600)
    assert (process.returncode, output, errors) == (0, "", "")


@pytest.mark.smoke
def test_killed_in_the_middle(start: Start, tmp_path: Path) -> None:
    """A hub that is killed again and again while runs are pushed shows in the end what their directories have."""
    runs = [MadeUp(run=f"run{number}", steps=300, findings=[finding()]) for number in range(3)]
    folders = {run.key: run.write(tmp_path / run.run) for run in runs}
    address, stop = [""], threading.Event()
    left = set(folders)

    def push() -> None:
        while left and not stop.is_set():
            for key in list(left):
                with suppress(OSError, RefusedError):
                    mirror = Mirror(folders[key])
                    post = Post(address[0], key, lambda: "")
                    mirror.learn(post.send([], all_files=True))
                    while pieces := mirror.pieces(20_000):
                        mirror.learn(post.send(pieces))
                    mirror.close()
                    left.discard(key)

    process, address[0] = start()
    thread = threading.Thread(target=push)
    thread.start()
    for _ in range(3):
        count = _received(address[0])
        until(lambda count=count: not left or _received(address[0]) > count + 3)
        process.kill()
        process.communicate()
        process, address[0] = start()
    assert until(lambda: not left)
    stop.set()
    thread.join()
    process.kill()
    process.communicate()
    store = Store(tmp_path / "hub.sqlite")
    for run in runs:
        same(store, run, folders[run.key])
    store.close()


def _received(url: str) -> float:
    with suppress(OSError):
        found = re.search(r'ddpdebug_hub_batches_total\{status="200"\} (\d+)', get(url + "/metrics"))
        return float(found[1]) if found else 0.0
    return 0.0


def test_no_room(start: Start, tmp_path: Path) -> None:
    """A hub that may write no more refuses batches, shows what it has, and takes the rest when it may again."""
    run = MadeUp(steps=900, findings=[finding()])
    directory = run.write(tmp_path / "run")
    with start_limited(tmp_path) as url:
        mirror = Mirror(directory)
        with pytest.raises(RefusedError, match="507"):
            mirror.bring(Post(url, run.key, lambda: "").send)
        assert json.loads(get(url + "/healthz")) == {"status": "ok"}
    _, url = start()
    mirror.verify()
    mirror.bring(Post(url, run.key, lambda: "").send)
    found = json.loads(get(f"{url}/api/v1/runs/{run.key}"))
    assert (found["state"], found["last_step"]) == ("finished", 899)
    store = Store(tmp_path / "hub.sqlite")
    same(store, run, directory)
    store.close()


class start_limited:  # noqa: N801 - read as the fixture is
    """A hub whose files may have 400 KiB."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-m", "ddpdebug", "hub", "--port", "0", "--data", str(folder / "hub.sqlite")]
        self._process = subprocess.Popen(
            ["bash", "-c", 'ulimit -f 400; exec "$@"', "bash", *words], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()[3].rstrip(",")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_two_processes_one_database(start: Start, tmp_path: Path) -> None:
    """Runs are imported into the database of a hub that serves it."""
    _, url = start()
    run = MadeUp()
    directory = run.write(tmp_path / "runs" / "a")
    assert main(["hub", "import", str(tmp_path / "runs"), "--data", str(tmp_path / "hub.sqlite")]) == 0
    assert json.loads(get(f"{url}/api/v1/runs/{run.key}"))["state"] == "finished"
    assert directory.is_dir()


@pytest.mark.smoke
def test_watch(start: Start, tmp_path: Path) -> None:
    """A hub that watches a directory shows the runs that come there."""
    (tmp_path / "runs").mkdir()
    _, url = start("--watch", str(tmp_path / "runs"))
    run = MadeUp(ended=None)
    run.write(tmp_path / "runs" / "team" / "a")
    until(lambda: json.loads(get(url + "/api/v1/runs"))["runs"])
    (found,) = json.loads(get(url + "/api/v1/runs"))["runs"]
    assert (found["key"], found["source"]) == (run.key, "watch")


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--host", "0.0.0.0"], {}, "needs a token"),
        (["--host", "::"], {}, "needs a token"),
        (["--host", "0.0.0.0"], {"DDPDEBUG_HUB_TOKEN": "short"}, "16 characters"),
        ([], {"DDPDEBUG_HUB_READ_TOKEN": "r" * 20}, "needs a DDPDEBUG_HUB_TOKEN"),
        (["--keep", "soon"], {}, "give a time"),
        (["--max-size", "1"], {}, "give a size"),
        (["--watch", "nowhere"], {}, "no directory"),
        (["--data", "postgresql+psycopg://nobody@127.0.0.1:9/x"], {}, "cannot open"),
        (["--host", "198.51.100.1"], {"DDPDEBUG_HUB_TOKEN": "t" * 20}, "cannot serve"),
        (["import", "nowhere"], {}, "there is no run"),
    ],
)
def test_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    variables: dict[str, str],
    message: str,
) -> None:
    """What cannot be served, or should not be, is refused before anything is started, and says what to do."""
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["hub", *words]) == 2
    assert message in capsys.readouterr().err


def test_other_hosts_with_a_token(start: Start) -> None:
    """With a token the hub binds any address; nobody reads without one."""
    _, url = start("--host", "0.0.0.0", DDPDEBUG_HUB_TOKEN="t" * 20)
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        get(url.replace("0.0.0.0", "127.0.0.1") + "/api/v1/runs")
    refused.value.close()
