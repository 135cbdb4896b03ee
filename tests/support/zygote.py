"""Runs jobs of several ranks, each rank forked from this process after torch was loaded, which saves the start-up.

    python zygote.py jobs.json results.json

A job is {"script", "args", "ranks", "cwd", "timeout"}; a script without a folder is one of `harm/scripts`. It may have
- "env": further environment variables
- "options": of `ddpdebug run`, or null for plain Python; one for all ranks, or {"0": ..., "1": ...}
- "inject": Python source per rank that runs before ddpdebug does
- "events": [[what to wait for: a text in the rank's output, or seconds; rank; signal], ...] in this order
- "teardown": let the interpreter tear itself down at the end, where gloo may abort; by default that is skipped
Its result is one {"status", "out", "err", "seconds", "left"} per rank; `left` tells of processes that outlived it.
Nothing of a job is left behind.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent.parent / "harm" / "scripts"


def free_port() -> int:
    """Return a port below those that systems hand out: nobody takes it by chance until the ranks do."""
    while True:
        port = secrets.choice(range(12_000, 32_000))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _become(job: dict[str, Any], rank: int, words: list[str]) -> None:
    """Run the script as `python script.py` or `python -m ddpdebug run script.py` would."""
    options = job["options"]
    if isinstance(options, dict):
        options = options[str(rank)]
    if options is None:
        sys.modules["ddpdebug"] = None  # type: ignore[assignment]  # plain means without
        sys.argv[:] = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    from ddpdebug.commands import main

    exec(job.get("inject", {}).get(str(rank), ""), {})
    sys.argv[:] = ["ddpdebug", "run", *options, *words]
    sys.exit(main(sys.argv[1:]))


def _child(job: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    status = 1
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
        os.chdir(job["cwd"])
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ.update(environ, WORLD_SIZE=str(job["ranks"]), LOCAL_RANK=str(rank), PYTHONPATH=str(_SCRIPTS))
        os.environ.update(job.get("env", {}))
        sys.path.insert(1, str(_SCRIPTS))
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        _become(job, rank, [str(_SCRIPTS / job["script"]), *job["args"]])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter would do
        traceback.print_exc()
    finally:
        if job.get("teardown"):
            raise SystemExit(status)
        # the interpreter's own ending: threads, exit handlers; not its teardown
        import atexit
        import threading

        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _left_behind(group: int) -> bool:
    """Tell whether a rank left processes behind (after a moment for helpers that end with it), and end them."""
    deadline = time.monotonic() + 3
    while _alive(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return True
        time.sleep(0.05)
    return False


def _alive(group: int) -> bool:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, in_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(in_group) == group and state != "Z":
            return True
    return False


class _Events:
    """Sends signals when it is time."""

    def __init__(self, events: list[Any], folder: Path, pids: dict[int, int]) -> None:
        self._events, self._folder, self._pids = list(events), folder, pids
        self._last = time.monotonic()

    def look(self) -> None:
        while self._events:
            condition, rank, number = self._events[0]
            if isinstance(condition, str):
                file = self._folder / f"{rank}.out"
                if not file.exists() or condition not in file.read_text():
                    return
            elif time.monotonic() - self._last < condition:
                return
            self._events.pop(0)
            self._last = time.monotonic()
            os.kill(self._pids[rank], number)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one job to its end or its timeout."""
    port = free_port()
    started = time.monotonic()
    parent = os.getpid()
    folder = Path(tempfile.mkdtemp())  # no context manager: a forked child's exit handlers would remove it
    try:
        pids: dict[int, int] = {}
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _child(job, rank, port, folder)
            pids[rank] = pid
        results: dict[int, dict[str, Any]] = {}
        events = _Events(job.get("events", []), folder, pids)
        while len(results) < len(pids):
            late = time.monotonic() - started > job["timeout"]
            for rank in pids.keys() - results.keys():
                if late:
                    os.killpg(pids[rank], signal.SIGKILL)
                pid, status = os.waitpid(pids[rank], 0 if late else os.WNOHANG)
                if pid:
                    left = _left_behind(pid)
                    code = None if late else os.waitstatus_to_exitcode(status)
                    results[rank] = {"status": code, "seconds": time.monotonic() - started, "left": left}
            events.look()
            time.sleep(0.01)
        for rank, result in results.items():
            for stream in ("out", "err"):
                result[stream] = (folder / f"{rank}.{stream}").read_text("utf-8", "replace")
    finally:
        if os.getpid() == parent:
            shutil.rmtree(folder)
    return [results[rank] for rank in range(job["ranks"])]


def preload() -> None:
    """Load what the ranks will need; nothing may compute or start threads before they are forked."""
    import numpy as np  # noqa: F401
    import torch._dynamo  # loaded when the first optimizer is built
    import torch.distributed.optim
    import torch.optim.swa_utils
    import torch.utils.data  # noqa: F401
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: F401

    spare_the_collector()


def spare_the_collector() -> None:
    """Take what was loaded out of the collector's sight: in each rank it would go through it, and copy its memory."""
    gc.collect()
    gc.freeze()


def main(jobs: Path, results: Path) -> None:
    """Run all jobs, one after the other."""
    preload()
    done = [run(job) for job in json.loads(jobs.read_text())]
    results.write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
