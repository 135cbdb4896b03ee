"""Whatever breaks, in the job or in ddpdebug, the job goes on or fails the way it would have failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, processes, until

from ddpdebug.run_directory.reader import read_rows

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_SCRIPTS = Path(__file__).resolve().parent / "scripts"

_PROBES = """
from ddpdebug.probes import gradients
from ddpdebug.probes.loop_calls import LoopCalls
from ddpdebug.probes.models import Models
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.recorder import Recorder
from ddpdebug.probes.buffers import Buffers
from ddpdebug.probes.memory import MemoryProbe
from ddpdebug.probes.nonfinite import Numerics
from ddpdebug.probes.forward_capture import ForwardCaptures
names = [(Recorder, n) for n in ("begin_forward", "end_forward", "begin_backward", "end_backward", "pre_step",
    "post_step")]
names += [(Models, "before_wrap"), (Models, "wrapped")]
names += [(Buffers, "before_forward"), (Buffers, "after_broadcast")]
names += [(ForwardCaptures, "begin"), (ForwardCaptures, "_end")]
names += [(Numerics, n) for n in ("_forward_begins", "_forward_ends", "before_step", "note_loss")]
names += [(MemoryProbe, "end_step")]
names += [(LoopCalls, "clipped"), (Loaders, "begin"), (Loaders, "delivered"), (gradients, "note_local")]
"""
_ALL_PROBES = (
    _PROBES
    + """
def broken(*args, **kwargs): raise RuntimeError("broken probe")
for owner, name in names: setattr(owner, name, broken)
"""
)
_EACH_PROBE = (
    _PROBES
    + """
state = {"n": 0}
def breaking(number, original):
    def run(*args, **kwargs):
        if state["n"] % len(names) == number: raise RuntimeError("broken probe")
        return original(*args, **kwargs)
    return run
for i, (owner, name) in enumerate(names): setattr(owner, name, breaking(i, getattr(owner, name)))
from torch.optim.optimizer import register_optimizer_step_pre_hook
from ddpdebug.monitor import monitor
original = monitor.Monitor.install
def install(self):
    original(self)
    def count(*_): state["n"] += 1; self.guard.off.clear()
    register_optimizer_step_pre_hook(count)
monitor.Monitor.install = install
"""
)
_ROWS = """
from ddpdebug.monitor import monitor
def broken(*args): raise RuntimeError("broken row")
monitor.encode_row = broken
"""
_PARTS = """
import ddpdebug.monitor.monitor
from ddpdebug.probes.record import Part
def broken(*args): raise RuntimeError("broken part")
for part in Part.__subclasses__(): part.columns = part.let_go = broken
"""
_BUFFERS = """
from types import SimpleNamespace
from ddpdebug.probes import buffers
def broken(): raise RuntimeError("broken digest")
buffers.device = SimpleNamespace(digests=lambda tensors: broken)
"""
#: The rules judge in the rank, where they can be broken.
_HERE = """
from ddpdebug.processes import detached
def refuse(*args): raise OSError("no process")
detached.start = refuse
"""
_DETECTORS = f"""{_HERE}
from ddpdebug.detectors.catalog import catalog
def broken(self, step): raise RuntimeError("broken rule")
for rule in catalog(): rule.detect = broken
"""
_DIAGNOSIS = f"""{_HERE}
from ddpdebug.diagnosis.engine import Diagnosis
def broken(self, *args): raise RuntimeError("broken diagnosis")
Diagnosis.feed = Diagnosis.finish = broken
"""
_SINKS = """
import errno
from ddpdebug.monitor.served import Served
from ddpdebug.run_directory import writer as run_directory
def full(self, record): raise OSError(errno.ENOSPC, "No space left on device")
run_directory.RunDirectory.write = Served.write = full
"""
_TERMINAL = """
from ddpdebug.sinks import terminal
def broken(self, record): raise RuntimeError("broken terminal")
terminal.Terminal.write = broken
"""
_DISK_FULL_LATER = """
import errno
from ddpdebug.run_directory import segments
def full(self, data): raise OSError(errno.ENOSPC, "No space left on device")
segments.Segments.append = full
"""
_GATHER = """
from ddpdebug.torch_internals import GlooGroup
original = GlooGroup.gather
calls = []
def gather(self, data):
    calls.append(1)
    if len(calls) > 8: raise RuntimeError("dead side group")
    return original(self, data)
GlooGroup.gather = gather
"""
_GATHER_HANGS = """
from ddpdebug.torch_internals import GlooGroup
original = GlooGroup.gather
calls = []
def gather(self, data):
    calls.append(1)
    if len(calls) > 8: time.sleep(3600)
    return original(self, data)
GlooGroup.gather = gather
"""
_CONNECT = """
from ddpdebug import torch_internals
def broken(*args): raise RuntimeError("no side group")
torch_internals.GlooGroup.__init__ = broken
"""
_STORE = """
from ddpdebug import torch_internals
def broken(*args): raise RuntimeError("no store")
torch_internals.private_store = broken
"""
_INSTALL = """
from ddpdebug.monitor import monitor
def broken(self): raise RuntimeError("cannot attach")
monitor.Monitor.install = broken
"""
_CLOSE = f"""{_HERE}
from ddpdebug.instrument.probes import Probes
from ddpdebug.diagnosis.engine import Diagnosis
def broken(self, *args, **kwargs): raise RuntimeError("broken end")
Probes.remove = Probes.release = Diagnosis.finish = broken
"""

_BOTH, _ZERO, _ONE = ("0", "1"), ("0",), ("1",)
#: name -> (source, ranks that it breaks)
BROKEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "every probe": (_ALL_PROBES, _BOTH),
    "every probe on one rank": (_ALL_PROBES, _ONE),
    "each probe in turn": (_EACH_PROBE, _BOTH),
    "the row on one rank": (_ROWS, _ONE),
    "every part of the row": (_PARTS, _BOTH),
    "every part of the row on one rank": (_PARTS, _ONE),
    "every detector": (_DETECTORS, _BOTH),
    "the diagnosis on one rank": (_DIAGNOSIS, _ZERO),
    "the disk is full from the start": (_SINKS, _BOTH),
    "the disk is full later": (_DISK_FULL_LATER, _BOTH),
    "the terminal": (_TERMINAL, _BOTH),
    "the side group on one rank": (_GATHER, _ONE),
    "the side group everywhere": (_GATHER, _BOTH),
    "the side group hangs on one rank": (_GATHER_HANGS, _ONE),
    "the side group does not connect on one rank": (_CONNECT, _ZERO),
    "no store on one rank": (_STORE, _ONE),
    "attaching on one rank": (_INSTALL, _ONE),
    "the end": (_CLOSE, _BOTH),
}
_STEADY = {"script": "steady.py", "args": ["16", "-"]}


@pytest.fixture(scope="module")
def broken(run_jobs: Callable[..., Any], selected: set[tuple[Any, ...]]) -> dict[str, Any]:
    """Run the same training plain, and with each part of ddpdebug broken."""
    jobs: list[dict[str, Any]] = [{**_STEADY, "options": None, "teardown": True}]
    names = [name for name in BROKEN if any(case[0] == name for case in selected)]
    for source, ranks in (BROKEN[name] for name in names):
        jobs.append({**_STEADY, "options": [], "inject": dict.fromkeys(ranks, source), "teardown": True})
    done = run_jobs(jobs)
    found = {"plain": done[0], **dict(zip(names, done[1:], strict=True))}
    for name, job in zip(found, jobs, strict=True):
        said = Path(job["cwd"]).glob("ddpdebug-runs/*/ranks/*/trouble.jsonl")
        found[name][0]["parts"] = [
            (path.parent.name, json.loads(line)["part"]) for path in said for line in path.read_text().splitlines()
        ]
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_broken_part(name: str, broken: dict[str, Any], compare: Callable[..., list[str]]) -> None:
    """A part of ddpdebug that fails leaves the job's results and status as they are, and ends soon."""
    assert compare(broken["plain"], broken[name]) == []


@pytest.mark.parametrize(
    "name, says",
    [
        ("every probe", 5),
        ("every probe on one rank", 5),
        ("every part of the row", 10),
        ("every detector", 10),
        ("the side group everywhere", 1),
    ],
)
def test_says_so_once(name: str, says: int, broken: dict[str, Any]) -> None:
    """Each part that is off is named once in the run directory, each cause once on the terminal."""
    parts = broken[name][0]["parts"]
    assert len({part for _, part in parts}) >= says
    assert len(set(parts)) == len(parts), parts
    causes = [line.partition(": ")[2] for line in broken[name][0]["err"].splitlines() if " switched itself off" in line]
    assert len({cause.partition(" off: ")[2] for cause in causes}) == len(causes) > 0, causes


def _job(what: str, steps: int = 12, pause: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"script": "steady.py", "args": [str(steps), what, str(pause)], **more}


#: They train on until the signal has come.
_LONG = {"steps": 4000, "pause": 0.05}
#: name -> (job, options per rank)
ENDS: dict[str, tuple[dict[str, Any], Any]] = {
    "os._exit at the end": (_job("os._exit"), []),
    "exit status of its own": (_job("sys.exit"), []),
    "an exception on one rank": (_job("raise"), []),
    "a rank is killed": (_job("-", **_LONG, events=[["step 4", 1, signal.SIGKILL]]), []),
    "rank 0 is killed": (_job("-", **_LONG, events=[["step 4", 0, signal.SIGKILL]]), []),
    "a rank is terminated": (_job("-", **_LONG, events=[["step 4", 1, signal.SIGTERM]]), []),
    "a rank is interrupted": (_job("-", **_LONG, events=[["step 4", 1, signal.SIGINT]]), []),
    "only rank 0 is watched": (_job("-", teardown=True), {"0": [], "1": None}),
    "only rank 1 is watched": (_job("-", teardown=True), {"0": None, "1": []}),
    "the run directory disappears": (_job("remove"), []),
}


@pytest.fixture(scope="module")
def ends(run_jobs: Callable[..., Any], selected: set[tuple[Any, ...]]) -> dict[str, Any]:
    """Run each job plain and watched."""
    names = [name for name in ENDS if (name,) in selected]
    jobs = [{**ENDS[name][0], "options": mode} for name in names for mode in (None, ENDS[name][1])]
    done = iter(run_jobs(jobs))
    return {name: (next(done), next(done)) for name in names}


@pytest.mark.parametrize("name", ENDS)
def test_same_end(name: str, ends: dict[str, Any], compare: Callable[..., list[str]]) -> None:
    """The job ends as it would have ended: status and output, and soon."""
    plain, watched = ends[name]
    assert [rank["status"] for rank in plain] != [None, None]
    assert compare(plain, watched) == []


def _findings(folder: Path) -> list[str]:
    (file,) = folder.glob("ddpdebug-runs/*/findings.jsonl")
    return [json.loads(line)["code"] for line in file.read_text().splitlines()]


def test_a_part_of_the_row_that_fails(
    run_jobs: Callable[..., Any], compare: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It costs its own columns on that rank, and a line; ranks are compared by the others, and it ends as plain."""
    watched = {"options": ["--every-step"], "inject": {"1": _BUFFERS}, "cwd": str(tmp_path)}
    plain, job = run_jobs([_job("fault", options=None), _job("fault", **watched)])
    assert compare(plain, job) == []
    assert [line for line in job[0]["err"].splitlines() if "switched itself off" in line] == [
        "ddpdebug: probe:buffers of rank 1 has switched itself off: RuntimeError: broken digest (the job goes on)"
    ]
    assert "RANK101" in _findings(tmp_path)
    (folder,) = tmp_path.glob("ddpdebug-runs/*")
    rows = list(read_rows(folder))
    assert {(bool(row.buffers_digest), row.rank) for row in rows} == {(True, 0), (False, 1)}
    assert all(row.params_before_digest and row.grads_digest and row.record_digest and row.clip_norm for row in rows)


@pytest.mark.smoke
def test_stopped_rank(run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """A rank that is stopped for 8 s and goes on is not lost: the job finishes, and a later fault is found."""
    events = [["step 4", 1, signal.SIGSTOP], [8.0, 1, signal.SIGCONT]]
    (result,) = run_jobs([_job("fault", steps=60, pause=0.02, events=events, options=[], cwd=str(tmp_path))])
    assert [rank["status"] for rank in result] == [0, 0], result
    assert max(rank["seconds"] for rank in result) > 8
    assert "switched itself off" not in result[0]["err"]
    assert "RANK101" in _findings(tmp_path)


def test_places_that_cannot_be_written(
    run_jobs: Callable[..., Any], compare: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A file where the run directory should be, a read-only directory and a full disk cost the record, nothing else."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "ddpdebug-runs").write_text("a file")
    jobs: list[dict[str, Any]] = [_job("-", options=None), _job("-", options=[], cwd=str(blocked))]
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        if mounted:
            jobs.append(_job("-", steps=60, options=["--out", str(small / "run")]))
            jobs.insert(2, _job("-", steps=60, options=None))
        plain, watched, *full = run_jobs(jobs)
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
    assert compare(plain, watched) == []
    assert "switched itself off" in watched[0]["err"]
    if full:
        assert compare(*full) == []
        assert "ddpdebug: the outcome is not written: " in full[1][0]["err"], full[1][0]["err"]


def test_taken_port(run_jobs: Callable[..., Any], compare: Callable[..., list[str]]) -> None:
    """A metrics port that somebody else has moves on to the next one, which is announced."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plain, watched = run_jobs([_job("-", options=None), _job("-", options=["--metrics-port", str(port)])])
    assert compare(plain, watched) == []
    assert "http://127.0.0.1:" in watched[0]["err"]
    assert f":{port}/" not in watched[0]["err"]


@pytest.fixture
def launched(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., int]]:
    """Run a job through torch's launcher, signal it or one of its ranks, and return the exit status."""
    started: list[subprocess.Popen[bytes]] = []

    def run(watched: bool, number: int, *, rank: int | None = None) -> int:
        port = ["--master-port", "0", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        words = [sys.executable, "-m", "torch.distributed.run", *port, "--nproc-per-node", "2"]
        words += ["-m", "ddpdebug", "run"] if watched else []
        words += [str(_SCRIPTS / "steady.py"), "40000", "-", "0.05"]
        folder = tmp_path / str(len(started))
        folder.mkdir()
        env = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{_SCRIPTS}", "DDPDEBUG_METRICS": "off"}
        env["TEST_LAUNCHED"] = str(folder)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True)
        started.append(process)
        until(lambda: process.poll() is not None or (folder / "out").read_text().count("step 4") == 2)
        assert process.poll() is None, (folder / "err").read_text()
        os.kill(process.pid if rank is None else _ranks(process.pid)[rank], number)
        status = process.wait(PATIENCE)
        assert until(lambda: not processes(f"TEST_LAUNCHED={folder}"))
        text = (folder / "err").read_text()
        assert "forcefully exiting" not in text, text  # a rank that does not end when it is asked to
        assert "ddpdebug/" not in text.replace("ddpdebug-runs/", "").split("Root Cause")[0].split("File")[0], text
        return status

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _ranks(launcher: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
            environ = (entry.parent / "environ").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == launcher and b"\0LOCAL_RANK=" in b"\0" + environ:
            found.append((environ.split(b"LOCAL_RANK=")[1][:1], int(entry.parent.name)))
    return [pid for _, pid in sorted(found)]


@pytest.mark.parametrize(
    "number, rank",
    [
        pytest.param(signal.SIGKILL, 1, id="a rank is killed"),
        pytest.param(signal.SIGINT, None, id="the launcher is interrupted", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, None, id="the launcher is terminated", marks=pytest.mark.thorough),
    ],
)
def test_launcher(number: int, rank: int | None, launched: Callable[..., int]) -> None:
    """Torch's launcher ends with the same status, has to kill no rank, and no rank is left."""
    assert launched(True, number, rank=rank) == launched(False, number, rank=rank)
