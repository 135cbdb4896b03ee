"""The user's own code around and inside a training: modes, odd containers and tensors, signals, warnings, threads.

Each script runs plain and attached: same output (weights, gradients, what the user saw), same status, and no part
of ddpdebug switched off.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

Run = Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]]
_OPTIONS = ["--metrics", "off", "--every-step", "--out", "run"]
_INPUTS = ("csr", "csc", "nested", "jagged", "dict", "subclass", "empty", "strided", "complex")
_AROUND = ("dispatch", "functions", "flops", "device", "autocast", "anomaly", "float64", "deterministic", "vmap")
_REST = ("signals", "timeouts", "interrupts", "runtime", "warnings", "threads", "ddp-threads")
_ALL = [*_INPUTS, *_AROUND, *_REST]


@pytest.fixture(scope="module")
def pairs(run_jobs: Run, selected: set[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both runs of each case that is tested, and the folder of the watched one."""
    cases = [kind for kind in _ALL if (kind,) in selected]
    jobs, folders = [], []
    for kind in cases:
        for options in (None, _OPTIONS):
            folders.append(tmp_path_factory.mktemp(kind))
            job = {"script": "users_code.py", "args": [kind], "ranks": 2 if kind == "ddp-threads" else 1}
            jobs.append({**job, "options": options, "cwd": str(folders[-1])})
    results = run_jobs(jobs)
    return {kind: (results[2 * i], results[2 * i + 1], folders[2 * i + 1]) for i, kind in enumerate(cases)}


@pytest.mark.parametrize("kind", _ALL)
def test_same_as_without(kind: str, pairs: dict[str, Any], compare: Callable[..., list[str]]) -> None:
    """Nothing tells the two apart, and the watched one was watched."""
    plain, watched, folder = pairs[kind]
    assert compare(plain, watched) == []
    assert plain[0]["status"] == 0, plain[0]["err"]
    assert plain[0]["out"]
    assert "switched itself off" not in watched[0]["err"], watched[0]["err"]
    outcome = json.loads((Path(folder) / "run" / "run.json").read_text())["outcome"]
    assert outcome["steps"], watched[0]["err"]
    codes = {json.loads(line)["code"] for line in (Path(folder) / "run" / "findings.jsonl").read_text().splitlines()}
    assert not {code for code in codes if code.startswith(("RANK", "HANG", "NUM"))}, codes
    if "threads" in kind:
        said = watched[0]["err"].count("several threads train at the same time")  # rank 0 says it for the others too
        assert 1 <= said <= len(watched), watched[0]["err"]
    if kind == "warnings":
        assert "users_code.py" in plain[0]["out"]
        assert "RAISED" in plain[0]["out"]
    if kind in {"complex", "csr"}:
        assert watched[0]["err"].count("Warning") == plain[0]["err"].count("Warning"), watched[0]["err"]


_INTERRUPTED_END = """import signal, sys, torch
class Preempted(Exception): pass
def preempted(number, frame): raise Preempted(number)
signal.signal(signal.SIGALRM, preempted)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
if entries := sys.modules.get("ddpdebug.probes.entries"):  # the signal comes while the hooks are taken away
    entries.Entries.close = lambda self, *_: signal.raise_signal(signal.SIGALRM)
else:
    signal.raise_signal(signal.SIGALRM)
"""


def test_a_signal_at_the_end_ends_the_job_once_the_end_is_told(run_jobs: Run, tmp_path: Path) -> None:
    """What the script's handler raises is raised, by a run whose outcome is known."""
    (tmp_path / "ends.py").write_text(_INTERRUPTED_END)
    jobs = [
        {"script": str(tmp_path / "ends.py"), "ranks": 1, "options": options, "cwd": str(tmp_path)}
        for options in (None, _OPTIONS)
    ]
    (plain,), (watched,) = run_jobs(jobs)
    assert plain["status"] == watched["status"] == 1
    assert "Preempted: 14" in watched["err"]
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]
    assert outcome["steps"] == {"0": 3}
