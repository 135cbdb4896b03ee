"""The pytest session of a rank: collects and runs the tests that the parent pytest names.

It is a session like any other, with the user's conftest files, plugins and assertion rewriting; only the loop over the
tests is ours. Reports go to the pytest that the user started as soon as they are made.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from ddpdebug.clock import time
from ddpdebug.isolation.process_state import RandomState
from ddpdebug.pytest_plugin.stacks import WHERE_ARE_YOU

_POLL_SECONDS = 0.001
#: The group waits longer than the test may take: where everybody was is then seen before anybody gives up.
_GROUP_MARGIN = datetime.timedelta(seconds=60)
#: What torch raises from its collectives and its store when they break or give up.
_KINDS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
#: What gloo, NCCL and torch's store say when a peer is gone or does not come.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|recvValue failed|failed to recv|"
    r"timed out (waiting|after)|socket timeout|wait timeout|monitoredBarrier|remote process exited|"
    r"NCCL communicator was aborted",
    re.IGNORECASE,
)


class RankSession:
    """The plugin that turns a pytest session into a rank."""

    def __init__(self, config: pytest.Config) -> None:
        facts: dict[str, Any] = config.ddpdebug_rank  # type: ignore[attr-defined]
        self.config = config
        self.current: dict[str, Any] = {}
        self._connection = Connection(facts["descriptor"])
        self._stacks = Path(facts["stacks"]).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._items: dict[str, pytest.Item] = {}
        self._complaints: list[str] = []
        self._sound = True
        self._pid = os.getpid()
        self._store: Any = None
        self._agent_store: Any = None
        self._surroundings = _Surroundings()
        logging.getLogger("c10d-NullHandler-default").propagate = False  # torch repeats there what it raises

    # --- the session --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing until a test is named."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each test that the parent pytest names, until it closes the connection."""
        faulthandler.register(WHERE_ARE_YOU, file=self._stacks, all_threads=True)
        self._say("ready")
        while (command := self._hear("run")) is not None:
            self.current = command
            self._run(session, command)
        return True

    def _hear(self, kind: str) -> dict[str, Any] | None:
        """Return the next command if it is of this kind."""
        try:
            command: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return command if command["kind"] == kind else None

    def _run(self, session: pytest.Session, command: Mapping[str, Any]) -> None:
        self._sound = True
        self._surroundings.restore(_rank_environment(command))
        try:
            item = self._find(session, command)
            if item is not None:
                self._say("started")
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        except pytest.exit.Exception as leave:
            self._sound = False
            self._say("stop", reason=str(leave))
        if os.getpid() != self._pid:
            os._exit(0)  # the test forked, and this is the child
        with contextlib.suppress(OSError, ValueError):  # what the test printed without capture: we may be ended soon
            sys.stdout.flush()
            sys.stderr.flush()
        self._say("finished")
        if self._sound and self._hear("leave") is not None:  # a peer may still need what we have sent
            self._leave_group()
            self._say("left")
        if not self._sound:
            os._exit(0)  # the connections close: no peer waits for us in vain

    def _find(self, session: pytest.Session, command: Mapping[str, Any]) -> pytest.Item | None:
        """Return the test, collected on first use of its file; otherwise say what went wrong."""
        nodeid = command["nodeid"]
        if nodeid not in self._items:
            self._complaints.clear()
            try:
                session.perform_collect([command["path"]])
            except pytest.UsageError as error:
                self._complaints.append(str(error))
        item = self._items.get(nodeid)
        if item is None:
            self._sound = False
            why = "\n".join(self._complaints) or (
                "the file was collected, and this test is not in it; the ids of parameters must be the same in every "
                "process (no addresses, no order of a set)"
            )
            self._say("lacking", text=f"{nodeid} was not collected in this rank\n{why}")
        return item

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remember the test, even if a plugin deselects it later: the parent session has chosen it."""
        self._items[item.nodeid] = item

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember the errors of a collection."""
        if report.failed:
            self._complaints.append(report.longreprtext)

    # --- one test -----------------------------------------------------------------------------------------------------

    def pytest_runtest_setup(self) -> None:
        """Form the process group, after skips were evaluated and before the first fixture."""
        if self.current["device"] != "cpu":
            _take_gpu(self.current)
        rank, world = self.current["rank"], self.current["world"]
        # a file and no port: it outlives every rank, and nothing has to be looked up
        self._store = FileStore(self.current["store"], world)
        if self.current["group"]:
            backend = "gloo" if self.current["device"] == "cpu" else "nccl"
            timeout = datetime.timedelta(seconds=self.current["timeout"]) + _GROUP_MARGIN
            dist.init_process_group(backend, store=self._store, rank=rank, world_size=world, timeout=timeout)
            self._await_peers(rank, world)
        else:
            self._serve_port(rank)

    def _await_peers(self, rank: int, world: int) -> None:
        """Wait until all have connected: a test that is over at once must not leave a peer in the middle of that."""
        self._store.set(f"formed/{rank}", "1")
        keys = [f"formed/{other}" for other in range(world)]
        while not self._store.check(keys):  # the pytest that watches us has the deadline
            time.sleep(_POLL_SECONDS)

    def _serve_port(self, rank: int) -> None:
        """Let the test form the group itself, from the environment: it finds the store that torchrun's agent has."""
        if rank == 0:
            self._agent_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store.set("port", str(self._agent_store.port))
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.get("port").decode(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Add the time, and whether a peer was lost, to the report, for the search for the first cause."""
        report = yield
        lost = call.excinfo is not None and is_lost_peer(call.excinfo.value)
        report.ddpdebug = {"time": call.stop, "lost_peer": lost}
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report to the parent pytest."""
        if os.getpid() != self._pid:
            return
        if not (report.passed or (report.skipped and report.when == "setup")):
            self._sound = False
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._say("report", data=data)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Send the warning to the parent pytest."""
        category = warning_message.category
        self._say(
            "warning",
            text=str(warning_message.message),
            category=[category.__module__, category.__qualname__],
            file=warning_message.filename,
            line=warning_message.lineno,
            when=when,
            nodeid=nodeid,
            location=location,
        )

    def _leave_group(self) -> None:
        try:
            gc.collect()  # a DDP in a cycle keeps its group's threads and connections
            if dist.is_initialized():
                dist.destroy_process_group()
            self._store = self._agent_store = None
        except Exception as error:  # noqa: BLE001 - whatever it is, this process is not used again
            self._sound = False
            print(f"could not leave the process group: {error}")

    def _say(self, kind: str, **facts: Any) -> None:
        if os.getpid() == self._pid:
            message = json.dumps({"kind": kind, "time": time.time(), **facts}, default=str)
            self._connection.send_bytes(message.encode("utf-8", "surrogatepass"))


class _Surroundings:
    """The state of a new process (environment, directory, random numbers), restored before each test."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._directory = Path.cwd()
        self._random = RandomState.now()

    def restore(self, environ: Mapping[str, str]) -> None:
        """Go back to the state of a new process, with `environ` on top."""
        if os.environ != {**self._environ, **environ}:
            os.environ.clear()
            os.environ.update({**self._environ, **environ})
        os.chdir(self._directory)
        self._random.restore()


def _rank_environment(command: Mapping[str, Any]) -> dict[str, str]:
    """Return what torchrun sets: each test is a job of its own."""
    rank, world = str(command["rank"]), str(command["world"])
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": f"pytest-{command['number']}",
    }


def _take_gpu(command: Mapping[str, Any]) -> None:
    world, rank = command["world"], command["rank"]
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < world:
        why = f"{world} ranks with device='cuda' need {world} GPUs, this machine has {there}"
        raise pytest.skip.Exception(why, _use_item_location=True)  # as pytest's own marks do
    torch.cuda.set_device(rank)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that a peer is gone or did not come in time."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__name__ in _KINDS:
            return True
        if isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
