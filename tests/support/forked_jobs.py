"""Runs jobs of several ranks that are forked from a process which has loaded torch: one for all tests of a worker."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent

Job = dict[str, Any]
Result = list[dict[str, Any]]


def clean_environment() -> dict[str, str]:
    """Return the environment of processes under test."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDPDEBUG_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class _Jobs:
    """Runs jobs one after the other in a process that has loaded torch, and that lasts."""

    def __init__(self, log: Path) -> None:
        self._log = log
        words = [sys.executable, str(_HERE / "zygote.py"), "-"]
        with log.open("wb") as file:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=file, env=clean_environment(), start_new_session=True
            )

    def __call__(self, jobs: list[Job]) -> list[Result]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
        self._process.stdin.flush()
        seconds = 100 + sum(job["timeout"] for job in jobs)
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            pytest.fail(f"the jobs did not end in {seconds} s: {self._log.read_text()}")
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        results: list[Result] = json.loads(line)
        return results

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="session")
def run_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[Job]], list[Result]]]:
    """Run jobs one after the other; each has a folder of its own unless it names one."""
    started: list[_Jobs] = []

    def run(jobs: list[Job]) -> list[Result]:
        folder = tmp_path_factory.mktemp("jobs")
        for number, job in enumerate(jobs):
            job.setdefault("ranks", 2)
            job.setdefault("args", [])
            job.setdefault("timeout", 300)
            if "cwd" not in job:
                job["cwd"] = str(folder / str(number))
                Path(job["cwd"]).mkdir()
        if not started:
            started.append(_Jobs(folder / "log"))
        return started[0](jobs)

    yield run
    for jobs in started:
        jobs.end()
