"""Runs jobs of several ranks, each rank forked from this process after torch was loaded, which saves the start-up.

Watched ranks are forked from a second process, which has loaded what `ddpdebug run` loads before the script begins.

    python zygote.py jobs.json results.json
    python zygote.py -    # takes lists of jobs, one a line, and answers with a line each

A job is {"script", "args", "ranks", "cwd", "timeout"}; a script without a folder is one of `harm/scripts`. It may have
- "env": further environment variables
- "options": of `ddpdebug run`, or null for plain Python; one for all ranks, or {"0": ..., "1": ...}
- "inject": Python source per rank that runs before ddpdebug does
- "patient": at its end a rank waits long for the others, which a busy machine may keep from running
- "meets": a rank that destroys its process group waits until the ranks have met; with a number the first so many
  times it does not
- "stays": ranks that do not end by themselves; the job is over once all others have
- "events": [[what to wait for: a text in the rank's output, or seconds; rank; signal], ...] in this order
- "tree": the watched ranks talk and are judged as very many do (decision 33)
- "teardown": let the interpreter tear itself down at the end, where gloo may abort; by default that is skipped
Its result is one {"status", "out", "err", "seconds", "left"} per rank; `left` tells of processes that outlived it.
Nothing of a job is left behind.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import free_port
from many_ranks import become_many

_SCRIPTS = Path(__file__).resolve().parent.parent / "harm" / "scripts"
#: Descriptors of this process that its ranks must not have.
_PIPES: list[int] = []
#: A rank that has not ended in time prints its stacks at this one, before it is killed. No test uses it.
_WHERE = signal.SIGRTMAX - 1
#: What Lightning calls in each program where ddpdebug is installed.
_CALLED = [("ddpdebug.trainers.lightning_plugin", f"{what}_callbacks") for what in ("trainer", "fabric")]


def _become(job: dict[str, Any], rank: int, words: list[str]) -> None:
    """Run the script as `python script.py` or `python -m ddpdebug run script.py` would."""
    options = job["options"]
    if isinstance(options, dict):
        options = options[str(rank)]
    if options is None:
        sys.modules["ddpdebug"] = None  # type: ignore[assignment]  # plain means without
        for module, door in _CALLED:  # but others find it by its metadata
            sys.modules.setdefault(module, types.ModuleType(module)).__dict__[door] = list
        sys.argv[:] = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    from ddpdebug.commands import main

    if job.get("patient"):
        from ddpdebug.exchange import ticks

        ticks.LEAVE_SECONDS = ticks._SILENCE_SECONDS = 60.0
        ticks.Exchange.close.__defaults__ = (61.0,)
    if job.get("meets") is not None:
        from ddpdebug.exchange.ticks import Exchange

        _meet_before_the_group_ends(Exchange, int(job["meets"]))
    if job.get("tree"):
        become_many()
    exec(job.get("inject", {}).get(str(rank), ""), {})
    sys.argv[:] = ["ddpdebug", "run", *options, *words]
    sys.exit(main(sys.argv[1:]))


def _meet_before_the_group_ends(exchange: Any, after: int) -> None:
    """Let a script that destroys its process group, and the store with it, wait until its ranks have met."""
    import torch.distributed as dist

    made: list[Any] = []
    ended: list[bool] = []
    start, destroy = exchange.start, dist.destroy_process_group

    def noted(self: Any) -> None:
        made.append(self)
        start(self)

    def patient(*args: Any, **kwargs: Any) -> None:
        ended.append(True)
        until = time.monotonic() + (60 if len(ended) > after else 0)
        while any(each.state == "meeting" for each in made) and time.monotonic() < until:
            time.sleep(0.02)
        destroy(*args, **kwargs)

    exchange.start, dist.destroy_process_group = noted, patient


def _child(job: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in _PIPES:  # not closed: their files are, where the interpreter tears itself down
            os.dup2(null, number, inheritable=False)
        os.close(null)
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
        faulthandler.register(_WHERE, sys.stderr)
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
    """Return whether a rank left processes behind (after some time for helpers that end with it), and end them."""
    deadline = time.monotonic() + 20
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


def _kill(pids: list[int], *, ask: bool) -> None:
    """End ranks; all say where they stand before the first is killed, which would end others."""
    if ask:
        for pid in pids:
            os.kill(pid, _WHERE)
        time.sleep(1)
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)


def run(job: dict[str, Any], enough: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
    """Run one job to its end or its timeout, or until enough was seen of it."""
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
            running = pids.keys() - results.keys()
            late = time.monotonic() - started > job["timeout"]
            over = late or enough() or running <= {*job.get("stays", ())}
            if over:
                _kill([pids[rank] for rank in running], ask=late)
            for rank in running:
                pid, status = os.waitpid(pids[rank], 0 if over else os.WNOHANG)
                if pid:
                    left = _left_behind(pid)
                    code = None if over else os.waitstatus_to_exitcode(status)
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


#: What is loaded before a watched script begins.
_OURS = (
    "ddpdebug.commands.run",
    "ddpdebug.monitor.attach",
    "ddpdebug.detectors.catalog",
    "ddpdebug.sinks.prometheus.exporter",
)


class Zygote:
    """This process, which has loaded torch, and a fork of it that has loaded ddpdebug as well and ends with it."""

    def __init__(self) -> None:
        preload()
        reading, requests = os.pipe()
        results, writing = os.pipe()
        if os.fork() == 0:
            os.close(requests)
            os.close(results)
            for name in _OURS:
                importlib.import_module(name)
            sys.modules["ddpdebug.detectors.catalog"].catalog()  # the rules
            spare_the_collector()
            _answer(reading, writing, run)
            os._exit(0)
        os.close(reading)
        os.close(writing)
        _PIPES.extend((requests, results))
        self._requests, self._results = os.fdopen(requests, "w"), os.fdopen(results)

    def run(self, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Run jobs, one after the other."""
        return [self._ask(job) if _is_watched(job) else run(job) for job in jobs]

    def _ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        self._requests.write(json.dumps(job) + "\n")
        self._requests.flush()
        results: list[dict[str, Any]] = json.loads(self._results.readline())
        return results


def _is_watched(job: dict[str, Any]) -> bool:
    """Return whether all ranks are."""
    options = job["options"]
    return None not in options.values() if isinstance(options, dict) else options is not None


def _answer(reading: int, writing: int, how: Callable[[Any], Any]) -> None:
    """Answer each line of JSON with one, until there are no more."""
    _PIPES.extend((reading, writing))
    with os.fdopen(reading) as requests, os.fdopen(writing, "w") as results:
        for line in requests:
            results.write(json.dumps(how(json.loads(line))) + "\n")
            results.flush()


def main(words: list[str]) -> None:
    """Run the jobs of a file, or those that come."""
    if words == ["-"]:
        reading, writing = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        _answer(reading, writing, Zygote().run)
        return
    jobs, results = map(Path, words)
    results.write_text(json.dumps(Zygote().run(json.loads(jobs.read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])
