"""The pool of rank processes of a pytest session: started on demand, reused, replaced when damaged.

A test is followed in its ranks to its end, or to the deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.clock import time
from ddpdebug.pytest_plugin.rank_setup import rank_setup
from ddpdebug.pytest_plugin.results import RankResult
from ddpdebug.pytest_plugin.stacks import WHERE_ARE_YOU
from ddpdebug.pytest_plugin.zygote import descendants

#: Loading torch and the user's conftest files may take long on a busy machine.
_START_SECONDS = 180.0
#: How long the others may take to tell what the first failure did to them.
_GRACE_SECONDS = 3.0
#: How long a rank has to say where it is, and the pool to end in order.
_LAST_WORDS_SECONDS = 1.0
_END_SECONDS = 5.0
#: This much of a rank's output is shown from its beginning, and as much from its end.
_OUTPUT_BYTES = 1 << 15


@dataclass(slots=True)
class Task:
    """A test to run, with the arguments of its mark; `timeout` in seconds."""

    nodeid: str
    path: str
    world: int
    timeout: float
    device: str
    group: bool


@dataclass(slots=True)
class Outcome:
    """The results of one test on all ranks."""

    ranks: list[RankResult]
    warnings: list[dict[str, Any]] = field(default_factory=list)
    stop: str | None = None  # a rank called `pytest.exit`
    trouble: str | None = None  # the ranks could not be started


@dataclass(slots=True)
class _Rank:
    """One process of the pool."""

    number: int
    connection: Connection
    spool: Path | None
    stacks: Path
    pid: int | None = None
    ready: bool = False
    status: int | None = None


class Pool:
    """Rank processes that wait for tests. None is started before the first test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._live = config.getoption("capture") == "no"  # output goes where ours goes
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="ddpdebug-ranks-"))
        self._ranks: list[_Rank] = []
        self._processes = itertools.count()
        self._tests = itertools.count()

    def run(self, task: Task) -> Outcome:
        """Run a test in the first `task.world` ranks; return also when the test hangs or kills its ranks."""
        number = next(self._tests)
        try:
            outcome = Outcome([RankResult(rank) for rank in range(task.world)])
            outcome.trouble = self._start(task.world)
            if outcome.trouble is None:
                self._send(task, number)
                _Following(self, task, outcome).follow()
                damage = not all(rank.sound for rank in outcome.ranks) or not self._leave(task.world)
                self._collect_output(outcome.ranks)
                (self._directory / f"{number}.store").unlink(missing_ok=True)
                damage = damage or self._are_strays()
            else:
                self._collect_output(outcome.ranks[: len(self._ranks)])
                outcome.trouble += self._last_words()
                damage = True
        except BaseException:
            self.discard()
            raise
        if damage:
            self.discard()
        return outcome

    def close(self) -> None:
        """Let the ranks' sessions finish, then end all processes."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(json.dumps({"kind": "end"}).encode())
        deadline = time.monotonic() + _END_SECONDS
        while any(rank.status is None for rank in self._ranks) and time.monotonic() < deadline:
            self.look(0.05)
        self.discard()
        if self._control is not None:
            self._control.close()
        if self._zygote is not None:
            try:
                self._zygote.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def discard(self) -> None:
        """End all ranks and their child processes; the next test gets new ones."""
        if self._control is not None and self._ranks:
            try:
                self._control.send(json.dumps({"kind": "sweep"}).encode())
                self._await("swept", _END_SECONDS)
            except (OSError, TimeoutError):
                self._abandon()
        for rank in self._ranks:
            rank.connection.close()
            for file in (rank.spool, rank.stacks):
                if file is not None:
                    file.unlink(missing_ok=True)
        self._ranks.clear()

    # --- starting -----------------------------------------------------------------------------------------------------

    def _start(self, world: int) -> str | None:
        """Start what is missing of `world` ready ranks; return what went wrong, None where nothing did."""
        deadline = time.monotonic() + _START_SECONDS
        try:
            if self._zygote is None or self._zygote.poll() is not None:
                self._ranks.clear()
                self._start_zygote()
            self.look(0.0)
            if self.statuses():  # killed while it waited
                self.discard()
            while len(self._ranks) < world:
                self._fork()
            while not all(rank.ready for rank in self._ranks):
                self.look(max(0.0, deadline - time.monotonic()))
                lost = [rank for rank in self._ranks if rank.status is not None]
                if lost:
                    return f"rank {lost[0].number} ended with {_status(lost[0].status)} before it was ready"
                if time.monotonic() > deadline:
                    return f"the ranks were not ready after {_START_SECONDS:.0f} s"
        except OSError as error:
            self._abandon()
            return f"the process that makes the ranks is gone ({error}); is torch installed for {sys.executable}?"
        return None

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("zygote.py")
        command = [sys.executable, str(script), str(theirs.fileno()), str(os.getpid())]
        environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        with theirs, (self._directory / "zygote.err").open("wb") as errors:
            self._zygote = subprocess.Popen(  # noqa: S603 - our own words
                command,
                stdin=subprocess.PIPE,
                stderr=None if self._live else errors,
                pass_fds=[theirs.fileno()],
                env=environ,
                cwd=self._config.invocation_params.dir,
                start_new_session=True,
            )
        self._control = ours
        assert self._zygote.stdin is not None
        with self._zygote.stdin as pipe:
            pickle.dump(rank_setup(self._config, self._directory), pipe)

    def _fork(self) -> None:
        """Ask for one more process."""
        number, serial = len(self._ranks), next(self._processes)
        ours, theirs = socket.socketpair()
        rank = _Rank(
            number=number,
            connection=Connection(ours.detach()),
            spool=None if self._live else self._directory / f"{serial}.out",
            stacks=self._directory / f"{serial}.stacks",
        )
        worker = getattr(self._config, "workerinput", {}).get("workerid")
        command = {
            "kind": "fork",
            "number": number,
            "name": f"{worker}-rank{number}" if worker else f"rank{number}",
            "spool": None if self._live else str(rank.spool),
            "stacks": str(rank.stacks),
            "basetemp": str(self._temporary() / f"ranks-{serial}"),
        }
        self._ranks.append(rank)
        with theirs:
            assert self._control is not None
            socket.send_fds(self._control, [json.dumps(command).encode()], [theirs.fileno()])
        self._await("forked", _START_SECONDS)

    def _temporary(self) -> Path:
        factory: pytest.TempPathFactory | None = getattr(self._config, "_tmp_path_factory", None)
        return self._directory if factory is None else factory.getbasetemp()

    def _abandon(self) -> None:
        """Give up a process that does not answer; with it go the ranks."""
        if self._zygote is not None:
            for pid in [*descendants(self._zygote.pid), self._zygote.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._zygote.wait()
        if self._control is not None:
            self._control.close()
        self._zygote = self._control = None

    def _last_words(self) -> str:
        try:
            said = (self._directory / "zygote.err").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return f"\n{said[-_OUTPUT_BYTES:]}"

    # --- talking ------------------------------------------------------------------------------------------------------

    def _send(self, task: Task, number: int) -> None:
        for rank in self._ranks[: task.world]:
            command = {
                "kind": "run",
                **asdict(task),
                "rank": rank.number,
                "number": number,
                "store": str(self._directory / f"{number}.store"),
                "shared": str(self._temporary() / f"shared-{number}"),
            }
            with contextlib.suppress(OSError):  # it has gone; that is noticed below
                rank.connection.send_bytes(json.dumps(command).encode())

    def look(self, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """Wait at most `seconds` for messages, and return those of the ranks that have come."""
        assert self._control is not None
        talking = {rank.connection: rank for rank in self._ranks if not rank.connection.closed}
        said = []
        for source in wait([self._control, *talking], seconds):
            if source is self._control:
                self._hear()
                continue
            rank = talking[source]  # type: ignore[index]
            try:
                message = json.loads(rank.connection.recv_bytes())
            except (EOFError, OSError):
                rank.connection.close()  # its end is told by the one who made it
                continue
            rank.ready = rank.ready or message["kind"] == "ready"
            said.append((rank.number, message))
        return said

    def _hear(self) -> str:
        """Read one message about processes and return its kind."""
        assert self._control is not None
        data = self._control.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it ended")
        message = json.loads(data)
        if message["kind"] == "forked":
            self._ranks[message["number"]].pid = message["pid"]
        elif message["kind"] == "exited":
            for rank in self._ranks:
                if rank.pid == message["pid"]:
                    rank.status = message["status"]
        return str(message["kind"])

    def _await(self, kind: str, seconds: float) -> None:
        assert self._control is not None
        deadline = time.monotonic() + seconds
        while wait([self._control], max(0.0, deadline - time.monotonic())):
            if self._hear() == kind:
                return
        raise TimeoutError(f"no answer to {kind!r} after {seconds:.0f} s")

    # --- after a test -------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, int]:
        """Return the exit statuses of the ranks that have ended."""
        return {rank.number: rank.status for rank in self._ranks if rank.status is not None}

    def ask_where(self, numbers: Sequence[int]) -> dict[int, str]:
        """Return the stacks of ranks that are still running, by rank."""
        asked = [rank for rank in self._ranks if rank.number in numbers and rank.pid is not None]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid or 0, WHERE_ARE_YOU)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while time.monotonic() < deadline and not all(_size(rank.stacks) for rank in asked):
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of what is being written
        return {rank.number: rank.stacks.read_text(encoding="utf-8", errors="replace") for rank in asked}

    def _collect_output(self, results: Sequence[RankResult]) -> None:
        for result in results:
            spool = self._ranks[result.rank].spool
            if spool is not None:
                result.output = _ends(spool)
                os.truncate(spool, 0)

    def _leave(self, world: int) -> bool:
        """Let the ranks leave their group, now that all have finished; return whether they did."""
        waiting = set(range(world))
        for rank in self._ranks[:world]:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(json.dumps({"kind": "leave"}).encode())
        deadline = time.monotonic() + _END_SECONDS
        while waiting and not self.statuses() and time.monotonic() < deadline:
            for number, message in self.look(max(0.0, deadline - time.monotonic())):
                if message["kind"] == "left":
                    waiting.discard(number)
        return not waiting

    def _are_strays(self) -> bool:
        """Return whether a test has left processes behind, or a rank has gone."""
        assert self._zygote is not None
        known = {rank.pid for rank in self._ranks}
        return bool(self.statuses()) or bool(set(descendants(self._zygote.pid)) - known)


class _Following:
    """One test on its way through the ranks, to its end or its deadline."""

    def __init__(self, pool: Pool, task: Task, outcome: Outcome) -> None:
        self._pool, self._task, self._outcome = pool, task, outcome
        self._ranks = outcome.ranks
        self._started = False
        self._deadline = time.monotonic() + _START_SECONDS  # collecting the file counts as starting
        self._first_failure: float | None = None

    def follow(self) -> None:
        """Wait for all ranks; end those that take too long."""
        while waiting := [rank for rank in self._ranks if not rank.over]:
            left = self._limit() - time.monotonic()
            if left <= 0:
                self._give_up(waiting)
                return
            for number, message in self._pool.look(left):
                self._hear(self._ranks[number], message)
            self._note_deaths()
            self._set_limits()

    def _limit(self) -> float:
        if self._first_failure is None:
            return self._deadline
        return min(self._deadline, self._first_failure + _GRACE_SECONDS)

    def _set_limits(self) -> None:
        if not self._started and all(rank.started or rank.over for rank in self._ranks):
            self._started = True
            self._deadline = time.monotonic() + self._task.timeout
        if self._first_failure is None and any(rank.failed_by_itself() and rank.over for rank in self._ranks):
            self._first_failure = time.monotonic()

    def _hear(self, rank: RankResult, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "started":
            rank.started = True
        elif kind == "report":
            rank.reports.append(message["data"])
        elif kind == "lacking":
            rank.lacking, rank.lacking_time = message["text"], message["time"]
        elif kind == "warning":
            self._outcome.warnings.append(message)
        elif kind == "stop":
            self._outcome.stop = message["reason"]
        elif kind == "finished":
            rank.finished = True

    def _note_deaths(self) -> None:
        for number, status in self._pool.statuses().items():
            if number < len(self._ranks) and not (rank := self._ranks[number]).over:
                while said := self._pool.look(0.0):  # its last messages may still be on the way
                    for other, message in said:
                        self._hear(self._ranks[other], message)
                if not rank.over:
                    rank.status, rank.end_time = status, time.time()

    def _give_up(self, waiting: Sequence[RankResult]) -> None:
        stacks = self._pool.ask_where([rank.rank for rank in waiting])
        for rank in waiting:
            rank.end_time, rank.stack = time.time(), stacks.get(rank.rank, "")
            rank.at_deadline = self._first_failure is None


def _status(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ends(path: Path) -> str:
    """Return a file's text, without its middle when it is long."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(2 * _OUTPUT_BYTES if size <= 2 * _OUTPUT_BYTES else _OUTPUT_BYTES)
            if size > 2 * _OUTPUT_BYTES:
                file.seek(size - _OUTPUT_BYTES)
                left_out = f"\n[... {size - 2 * _OUTPUT_BYTES} bytes left out ...]\n"
                head += left_out.encode() + file.read(_OUTPUT_BYTES)
    except OSError:
        return ""
    return head.decode("utf-8", "replace")
