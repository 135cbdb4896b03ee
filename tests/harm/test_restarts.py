"""Every attempt of an elastic job, and every new process group, is compared anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_SCRIPTS = Path(__file__).resolve().parent / "scripts"


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a job of two ranks under torch's launcher in a folder of its own; all are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(name: str, *launcher: str, watched: bool = True) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torch.distributed.run", *launcher, "--max-restarts", "2"]
        words += ["-m", "ddpdebug", "run", "--out", "run", "--metrics", "off"] if watched else []
        words += [str(_SCRIPTS / "restarts.py"), "40", "0.02"]
        folder = tmp_path / name
        folder.mkdir()
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
            )
        started.append(process)
        return process

    yield launch
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def _findings(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "findings.jsonl").read_text().splitlines()]


_ONE_NODE = ("--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_the_second_attempt_is_compared_in_two_jobs_at_once(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The keys of the first attempt are still in the agent's store; nobody follows them, nor those of another job."""
    jobs = {"a": start("a", *_ONE_NODE), "b": start("b", *_ONE_NODE)}
    for name, process in jobs.items():
        process.wait(PATIENCE)
        out, err = (tmp_path / name / "out").read_text(), (tmp_path / name / "err").read_text()
        assert out.count("trained") == 2, err
        assert out.count("attempt 1 keys of ddpdebug True") == 2
        assert "switched itself off" not in err
        assert "ERROR" not in err.replace("ERROR: ", ""), err
        second = _findings(tmp_path / name / "run")
        assert [(f["code"], f["step"], f["ranks"]) for f in second if f["code"] == "RANK101"] == [("RANK101", 11, [1])]
        assert all("values" in f["evidence"] for f in second[-1:])
        assert "RANK101" not in {f["code"] for f in _findings(tmp_path / name / "run" / "previous-1")}


_KINDS = {"again": "", "late": "", "file": "", "mine": "the job's store gives no connection of our own"}
#: Groups that are ended before the one that stays, in which the ranks have to meet, however busy the machine is.
_ENDED_BEFORE = {"again": 3, "late": 3, "file": 0}
#: A busy machine lets rank 0 look for the others only when the group whose store it has got is long gone.
_LATE = """
import time
from ddpdebug.monitor.monitor import Monitor
connect = Monitor._connect
Monitor._connect = lambda self, *args: time.sleep(2) or connect(self, *args)
"""


@pytest.mark.parametrize("kind", _KINDS)
def test_groups_that_come_and_go(
    kind: str, run_jobs: Callable[..., Any], compare: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The ranks meet in the group that stays; a store that gives us no connection is left alone, and that is said."""
    job = {"script": "regroup.py", "args": ["again" if kind == "late" else kind]}
    watch = {"options": ["--out", "run"], "cwd": str(tmp_path), "patient": True, "meets": _ENDED_BEFORE.get(kind)}
    watch["inject"] = {"0": _LATE} if kind == "late" else {}
    plain, watched = run_jobs([{**job, "options": None}, {**job, **watch}])
    assert [rank["status"] for rank in plain] == [0, 0], plain
    assert compare(plain, watched) == []
    err = watched[0]["err"]
    says = _KINDS[kind]
    assert ("switched itself off" in err) == bool(says), err
    assert says in err
    codes = {finding["code"] for finding in _findings(tmp_path / "run")} if not says else set()
    assert ("RANK101" in codes) == (not says), err
