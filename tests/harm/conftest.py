"""Compares training scripts with and without ddpdebug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import Result, clean_environment


def run_hard(words: list[str], timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, and end the group after `timeout` seconds."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": clean_environment(), **more}
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{words} did not end in {timeout} s:\n{out[-2000:]}\n{err[-4000:]}")
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of the processes under test."""
    return clean_environment()


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in a fresh process."""

    def run(source: str, cwd: Path, *args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return run_hard([sys.executable, "-c", source, *args], timeout, cwd=cwd)

    return run


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> set[tuple[str, ...]]:
    """The parameters of this module's tests that will run, so that only their jobs do."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {tuple(item.callspec.params.values()) for item in items}


def differences(plain: Result, watched: Result) -> list[str]:
    """Say what a user could tell the two runs apart by. 60 s more are a wait; a hang lasts longer."""
    seconds = 60.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    found: list[str] = []
    for rank, (a, b) in enumerate(zip(plain, watched, strict=True)):
        if a["status"] != b["status"]:
            found.append(f"rank {rank}: status {a['status']} became {b['status']}")
        if a["out"] != b["out"]:
            pairs = zip(a["out"].splitlines(), b["out"].splitlines(), strict=False)
            lines = [f"- {x[:200]}\n+ {y[:200]}" for x, y in pairs if x != y] or ["another number of lines"]
            found.append(f"rank {rank}: output\n" + "\n".join(lines))
        if b["seconds"] > a["seconds"] + seconds:
            found.append(f"rank {rank}: {a['seconds']:.1f} s became {b['seconds']:.1f} s")
        if b["left"] and not a["left"]:
            found.append(f"rank {rank}: a process outlived it")
        words = ("terminate called", "Fatal Python error")
        found += [f"rank {rank}: {word}" for word in words if word in b["err"] and word not in a["err"]]
        if b["err"].count("Traceback") > a["err"].count("Traceback"):
            found.append(f"rank {rank}: traceback")
    return found + [f"rank {rank}: {b['err'][-3000:]}" for rank, b in enumerate(watched) if found]


@pytest.fixture(scope="session")
def compare() -> Callable[..., list[str]]:
    """Tell two runs apart."""
    return differences
