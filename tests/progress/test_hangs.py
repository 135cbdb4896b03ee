"""Faults that stop a job of two or four real ranks, and healthy jobs that look as if they had stopped.

The jobs of all tests that were chosen run side by side, in ranks that are forked from one process (`jobs.py`); each
ends as soon as its hang is in the files. None of the tests asserts how long that took: `make bench-hangs` measures it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from jobs import Job, Result, line_of

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A stop, and what has to be said of it.

    Args:
        ranks: that are named; by default the one that stops.
        mark: of the line that is named; None where it is that of the last look, which nobody can foresee.
        phase: that is named; None where any will do.
        says: what the evidence has to say, a regular expression.
        quick: runs with `make test`.
        tree: the ranks talk and are judged as very many do.
    """

    kind: str
    code: str
    rank: int = 1
    world: int = 2
    ranks: tuple[int, ...] | None = None
    mark: str | None = "stops"
    phase: str | None = "script"
    says: str = ""
    quick: bool = False
    tree: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rank}-of-{self.world}{'-tree' * self.tree}"

    def job(self) -> Job:
        return Job(kind=self.kind, rank=self.rank, world=self.world, tree=self.tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A job in which nothing is wrong, with the seconds for which that lasts."""

    kind: str
    rank: int
    seconds: float
    world: int = 2

    @property
    def name(self) -> str:
        return self.kind

    def job(self) -> Job:
        common = {"rank": self.rank, "world": self.world, "seconds": self.seconds}
        return Job(kind=self.kind, script="works.py", whole=True, limit=400, **common)


#: Marks of lines of the training loop, which all kinds share.
_LOOP = frozenset({"data", "forward", "backward"})


def _stuck(kind: str, says: str, **more: Any) -> Fault:
    """A rank that does not move, and the kind of thing that it waits for."""
    return Fault(kind=kind, code="HANG501", says=says, **more)


def _loader(kind: str, says: str, **more: Any) -> Fault:
    return _stuck(kind, says, mark="data", phase="data", **more)


def _silent(kind: str, says: str, **more: Any) -> Fault:
    """A rank whose interpreter gives no sign of life."""
    return _stuck(kind, f"no sign of life .* {says}", mark=None, phase="interpreter", **more)


def _differ(kind: str, says: str, **more: Any) -> Fault:
    """Ranks that have called different things."""
    return Fault(kind=kind, code="HANG502", says=says, **{"phase": "collective", **more})


def _left(kind: str, says: str, **more: Any) -> Fault:
    """A rank that has left."""
    return Fault(kind=kind, code="HANG503", says=says, **{"mark": None, "phase": None, **more})


_KILLED = "killed by SIG|no process any more"
#: How torch tells of a worker that was killed, by who sees it first: the signal's handler, the loader, the queue.
_WORKER = r"worker \(pid.* (is killed by signal|exited unexpectedly)|ConnectionResetError"
_IN_CALLS = ("operation", "objects", "barrier", "not_called", "crossed", "new_group")
_ALSO_OF_MANY = {
    *_IN_CALLS,
    "lock",
    "join",
    "stdin",
    "worker_stopped",
    "sigstop",
    "regex",
    "sigkill",
    "return",
    "raise",
}
FAULTS = (
    _stuck("lock", "waits for a lock", quick=True),
    _stuck("lock", "waits for a lock", rank=0, world=4),
    _stuck("condition", "waits for a lock", rank=0),
    _stuck("event", "waits for a lock"),
    _stuck("join", "waits for a lock", rank=3, world=4),
    _stuck("future", "waits for a lock"),
    _stuck("queue", "waits for an item of a queue", rank=0),
    _stuck("simple_queue", "waits for an item of a queue"),
    _stuck("mp_queue", "waits for an item of a queue"),
    _stuck("socket", "waits for the network", rank=2, world=4),
    _stuck("accept", "waits for the network"),
    _stuck("pipe", "waits for a file or a pipe"),
    _stuck("child_pipe", "waits for a file or a pipe"),
    _stuck("fifo", "waits for a file or a pipe", rank=0),
    _stuck("flock", "waits for a file or a pipe"),
    _stuck("stdin", "input from a person", rank=0, world=4),
    _stuck("debugger", "a debugger waits for a command", rank=2, world=4),
    _stuck("process", "waits for another process"),
    _stuck("sleep", "sleeps", rank=0),
    _stuck("poll", "sleeps", rank=3, world=4),
    _stuck("key", "waits for a key"),
    _stuck("messages", "waits for a lock", rank=2, world=4),
    _loader("worker_blocked", r"worker \d+ asleep"),
    _loader("worker_stopped", r"worker \d+ stopped by a signal", rank=2, world=4),
    _loader("worker_lock", r"worker \d+ asleep", rank=0),
    _silent("sigstop", "stopped by a signal", quick=True),
    _silent("sigstop", "stopped by a signal", rank=0, world=4),
    _silent("gil", "asleep"),
    _silent("gil", "asleep", rank=0),
    _silent("regex", "in a regular expression", rank=3, world=4),
    _silent("pattern", "in a regular expression", rank=0),
    _differ("operation", "operation", ranks=(0, 1), mark="other"),
    _differ("operation", "broadcast #22", rank=3, world=4, quick=True),
    _differ("objects", "operation", rank=2, world=4),
    _differ("root", "", ranks=(0, 1)),
    _differ("conditional", "all_reduce #22", rank=0, world=4),
    _differ("barrier", "barrier #22", rank=0, world=4),
    _differ("barrier", "barrier #22", rank=0, ranks=(0, 1)),
    _differ("not_called", "barrier #22", rank=2, world=4, mark="forward", phase="forward"),
    _differ("nan_continue", "all_reduce", rank=2, world=4, mark="forward", phase="forward"),
    _differ("crossed", "order", ranks=(0, 1)),
    _differ("crossed", "order", rank=2, world=4),
    _differ("new_group", "new_group", rank=2, world=4),
    _differ("new_group", "new_group", rank=0, ranks=(0, 1)),
    _differ("recv", "recv", rank=2, world=4),
    _differ("uneven_barrier", "barrier", rank=2, world=4),
    _left("sigkill", _KILLED, mark="stops", phase="script"),
    _left("sigkill", _KILLED, rank=2, world=4, mark="stops", phase="script", quick=True),
    _left("sigkill", _KILLED, rank=0, mark="stops", phase="script"),
    _left("sigkill", _KILLED, rank=0, world=4, mark="stops", phase="script"),
    _left("segv", _KILLED),
    _left("os_exit", "exit status 3|no process any more", rank=0, world=4),
    _left("return", "finished"),
    _left("return", "finished", rank=0, world=4),
    _left("exit", "finished", rank=3, world=4),
    _left("uneven", "finished", rank=2, world=4),
    _left("raise", "KeyError: 'no such sample'", mark="stops"),
    _left("raise", "KeyError: 'no such sample'", rank=0, world=4, mark="stops"),
    _left("worker_killed", _WORKER, rank=3, world=4),
)
#: What stops one of four ranks in one of these ways is found over the tree as well.
OVER_A_TREE = tuple(replace(case, tree=True) for case in FAULTS if case.world == 4 and case.kind in _ALSO_OF_MANY)
TRAPS = (
    Trap(kind="imports", rank=0, seconds=60),
    Trap(kind="evaluation", rank=0, seconds=40),
    Trap(kind="checkpoint", rank=0, seconds=30),
    Trap(kind="join", rank=1, seconds=30),
    Trap(kind="first_step", rank=1, seconds=25),
    Trap(kind="slow_loader_everywhere", rank=1, seconds=24),
    Trap(kind="slow_loader", rank=1, seconds=20),
    Trap(kind="first_batch", rank=1, seconds=15),
    Trap(kind="compile", rank=1, seconds=20),
    Trap(kind="hog", rank=0, seconds=20),
    Trap(kind="in_c", rank=1, seconds=15),
    Trap(kind="finds", rank=1, seconds=9),
    Trap(kind="all_sleep", rank=1, seconds=20),
    Trap(kind="stopped_for_a_moment", rank=1, seconds=3),
    Trap(kind="download", rank=0, seconds=20),
    Trap(kind="subprocess", rank=0, seconds=20),
    Trap(kind="shell", rank=0, seconds=20),
    Trap(kind="copy", rank=0, seconds=20),
    Trap(kind="pool", rank=0, seconds=20),
    Trap(kind="thread", rank=1, seconds=20),
    Trap(kind="file_of_another", rank=0, seconds=20, world=3),
    Trap(kind="apart", rank=1, seconds=12),
    Trap(kind="apart_at_once", rank=1, seconds=8),
)


#: Of the slow cases so many may go wrong, as with the corpus of faults: what a rank is seen to do on two cores that do
#: much else is chance. Those of `make test` are asserted one by one.
_REQUIRED = 0.95


def _wrong(case: Fault, result: Result) -> str:
    """Return what was told wrongly of a stop: its kind's code, who stops it, where that stands, what it waits for."""
    found = result.first
    if not found:
        return "nothing: " + "\n".join(output[-3000:] for output in result.output)
    line = case.mark and line_of(case.mark, "" if case.mark in _LOOP else case.kind)
    right = (
        {line["code"] for line in result.findings} == {case.code}
        and found["ranks"] == list(case.ranks or (case.rank,))
        and (line is None or found["location"].endswith(f"stops.py:{line}"))
        and case.phase in {None, found["phase"]}
        and re.search(case.says, json.dumps(found["evidence"]))
    )
    return "" if right else str(result.findings)


@pytest.mark.smoke
@pytest.mark.parametrize("case", [case for case in FAULTS if case.quick], ids=lambda case: case.name)
def test_a_stop_is_found(case: Fault, result: Result) -> None:
    assert _wrong(case, result) == ""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FAULTS, id="all", marks=pytest.mark.slow),
        pytest.param(OVER_A_TREE, id="over_a_tree", marks=pytest.mark.thorough),
    ],
)
def test_stops_are_found(cases: tuple[Fault, ...], results: dict[Job, Result]) -> None:
    wrong = {case.name: told for case in cases if (told := _wrong(case, results[case.job()]))}
    print("\n".join(f"{name}: {told}" for name, told in wrong.items()))
    assert len(wrong) <= (1 - _REQUIRED) * len(cases), list(wrong)
    of_kind = {case.kind: [other.name for other in cases if other.kind == case.kind] for case in cases}
    never = [kind for kind, names in of_kind.items() if len(names) > 1 and {*names} <= {*wrong}]
    assert never == []  # twice is no chance


@pytest.mark.slow
@pytest.mark.parametrize("cases", [TRAPS], ids=["all"])
def test_a_rank_at_work_is_not_accused(cases: tuple[Trap, ...], results: dict[Job, Result]) -> None:
    """However long others wait for it; and each job ends as it would without anybody who looks."""
    accused = {}
    for case in cases:
        result = results[case.job()]
        assert result.statuses == [0] * case.world, (case.name, "\n".join(output[-3000:] for output in result.output))
        if result.findings:
            accused[case.name] = result.findings
    assert len(accused) <= (1 - _REQUIRED) * len(cases), accused
