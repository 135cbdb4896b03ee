"""Ranks that are not alike: other versions, other settings, late, broken. The job goes on, and what is off is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_LAYOUT = "import ddpdebug.exchange.ticks as exchange; exchange.ROW_BYTES += 8"
_VERSION = "import ddpdebug.monitor.monitor as monitor; monitor.__version__ = '0.3.0'"
_TORCH = """
from ddpdebug.monitor.monitor import Monitor
identity = Monitor._identity
Monitor._identity = lambda self: {**identity(self), "versions of torch": "2.12.0"}
"""
#: What version 0.1.0 does to meet the others.
_OLD = """
import time
from ddpdebug.exchange.meeting import RollCall
def meet(self):
    self._store.set(f"ddpdebug/0/group/0/here/{self.rank}", "1")
    while not self._store.check([f"ddpdebug/0/group/0/here/{other}" for other in range(self.world)]):
        if self._give_up() is not None:
            raise RuntimeError("the other ranks are not watched by ddpdebug, or not reached")
        time.sleep(0.05)
    raise AssertionError("it has met somebody")
RollCall.meet = meet
"""
_DIES_MEETING = """
from ddpdebug.exchange.meeting import RollCall
def dies(self): self._queue_up(); raise SystemExit("dies while it meets the others")
RollCall.meet = dies
"""
_LATE = """
import time
from ddpdebug.exchange.meeting import RollCall
meet = RollCall.meet
def late(self): time.sleep(1.0); return meet(self)
RollCall.meet = late
"""
_GIVES_UP = """
from ddpdebug.exchange.ticks import Exchange
tick = Exchange._tick
def tick_or_not(self):
    if self.ticks > 6 and self.progress > 20: raise RuntimeError("boom")
    return tick(self)
Exchange._tick = tick_or_not
"""
_GIVES_UP_TREE = _GIVES_UP.replace("ticks import Exchange", "tree_ticks import TreeExchange as Exchange")
_NONSENSE = """
import random
from ddpdebug.probes import record
encode, noise, rows = record.encode, random.Random(0), []
def nonsense(row):
    rows.append(row)
    return noise.randbytes(len(encode(row))) if len(rows) % 4 == 0 else encode(row)
record.encode = nonsense
"""
_CIRCLE = """
from ddpdebug.monitor.monitor import Monitor
say = Monitor._say
def circular(self, kind, **fields):
    if kind == "fact" and fields["topic"].startswith("structure"):
        fields["value"] = {"itself": {}}
        fields["value"]["itself"]["again"] = fields["value"]
    return say(self, kind, **fields)
Monitor._say = circular
"""
_STORE = """
from ddpdebug import torch_internals
def without(): raise ConnectionError("the job's store (Mine) gives no connection of our own")
torch_internals.private_store = without
"""
_TICKS = """
from ddpdebug.processes import detached
def refuse(*args): raise OSError("no process")
detached.start = refuse
from ddpdebug.diagnosis.engine import Diagnosis
def broken(self, *args): raise RuntimeError("broken fact")
Diagnosis.tell = broken
"""
_VOTES = """
from ddpdebug.exchange.step_vote import NumericGuard
def broken(self, *args): raise RuntimeError("broken vote")
NumericGuard.hear = broken
"""

_LONG, _FAULT = ["400", "-", "0.02"], ["60", "fault", "0.03"]
#: name -> (arguments of the script, options per rank or of all, source per rank, what rank 0 says, is compared)
CASES: dict[str, tuple[list[str], Any, dict[str, str], str, bool]] = {
    "another layout": (_FAULT, [], {"1": _LAYOUT}, "different layouts of rows (rank 0 ", False),
    "another version": (
        _FAULT,
        [],
        {"1": _VERSION},
        "different versions of ddpdebug (rank 0 0.1.0, rank 1 0.3.0): install the same on all nodes",
        False,
    ),
    "version 0.1.0": (_LONG, [], {"1": _OLD}, "different versions of ddpdebug (rank 1 0.1.0, rank 0 0.1.0)", False),
    "version 0.1.0 on rank 0": (_LONG, [], {"0": _OLD}, "", False),
    "another torch": (_FAULT, [], {"1": _TORCH}, "different versions of torch (rank 0 2.13.0, rank 1 2.12.0)", False),
    "the guard on one rank": (
        _FAULT,
        {"0": [], "1": ["--guard", "stop"]},
        {},
        "different settings of guard (rank 0 observe, rank 1 stop): give all ranks the same",
        False,
    ),
    "another budget": (
        _FAULT,
        {"0": [], "1": ["--budget", "0.5"]},
        {},
        "rank 0 has 0.01, and that holds for all",
        True,
    ),
    "every step on one rank": (_FAULT, {"0": [], "1": ["--every-step"]}, {}, "every_step=True of rank 1", True),
    "a rank dies while it meets": (_FAULT, [], {"1": _DIES_MEETING}, "", False),
    "a rank comes late": (_FAULT, [], {"1": _LATE}, "", True),
    "a rank gives up": (_FAULT, [], {"1": _GIVES_UP}, "rank 1 has given up: RuntimeError: boom", True),
    "nonsense for rows": (_FAULT, [], {"1": _NONSENSE}, "a row of rank 1 ", True),
    "a rank gives up, over a tree": (
        _FAULT,
        [],
        {"1": _GIVES_UP_TREE},
        "rank 1 has given up: RuntimeError: boom",
        True,
    ),
    "nonsense for rows, over a tree": (_FAULT, [], {"1": _NONSENSE}, "row of rank 1 ", True),
    "what JSON cannot say": (_FAULT, [], {"1": _CIRCLE}, "message:fact of rank 1 ", True),
    "a store without a clone": (
        _FAULT,
        [],
        dict.fromkeys(("0", "1"), _STORE),
        "the job's store (Mine) gives no",
        False,
    ),
    # where no process can be beside the rank that leads, nobody else judges
    "announcements": (_FAULT, [], {"0": _TICKS}, "diagnosis has switched itself off", False),
    "votes on one rank": (_LONG, ["--guard", "stop"], {"1": _VOTES}, "message:vote of rank 1 ", True),
}


@pytest.fixture(scope="module")
def done(run_jobs: Callable[..., Any], selected: set[tuple[Any, ...]], tmp_path_factory: Any) -> dict[str, Any]:
    """Run each job plain and watched."""
    jobs: list[dict[str, Any]] = []
    names = [name for name in CASES if (name,) in selected]
    folders = {name: tmp_path_factory.mktemp("watched") for name in names}
    plain = [args for args in (_LONG, _FAULT) if any(CASES[name][0] is args for name in names)]
    jobs += [{"script": "steady.py", "args": args, "options": None} for args in plain]
    for name in names:
        args, options, inject, _, compared = CASES[name]
        job = {"script": "steady.py", "args": args, "options": options, "inject": inject, "cwd": str(folders[name])}
        jobs.append({**job, "patient": compared, "tree": name.endswith("over a tree")})
    results = run_jobs(jobs)
    plains = {id(args): result for args, result in zip(plain, results, strict=False)}
    watched = dict(zip(names, results[len(plain) :], strict=True))
    return {name: (plains[id(CASES[name][0])], watched[name], folders[name]) for name in names}


#: One more way into what another one shows: run by `make test-thorough`.
_VARIANTS = {
    "another torch",
    "version 0.1.0 on rank 0",
    "another budget",
    "a rank gives up, over a tree",
    "nonsense for rows, over a tree",
    "what JSON cannot say",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in _VARIANTS else []) for name in CASES]
)
def test_the_job_is_the_same_and_it_is_said(name: str, done: dict[str, Any], compare: Callable[..., list[str]]) -> None:
    """Bits, output and status as without ddpdebug; one line names what is off; what can be compared is compared."""
    plain, watched, folder = done[name]
    args, _, _, says, compared = CASES[name]
    assert compare(plain, watched) == []
    err = watched[0]["err"]
    lines = [line for line in err.splitlines() if "switched itself off" in line]
    assert sum(says in line for line in lines) == (1 if says else 0), err
    assert len(set(lines)) == len(lines)
    assert "was skipped" not in err
    assert "ERROR" not in err
    codes = _findings(folder)
    assert ("RANK101" in codes) == (compared and args is _FAULT), (codes, err)
    assert "RANK112" not in codes


def _findings(folder: Path) -> list[str]:
    files = folder.glob("ddpdebug-runs/*/findings.jsonl")
    return [json.loads(line)["code"] for file in files for line in file.read_text().splitlines()]
