"""Whatever is not compared is said while the job goes on as before: terminal, run.json, verdict, metric."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.ci.publish import judge_directory
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.schema.coverage import Coverage

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_TRAIN = """
import json, re, sys, time, urllib.request
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(24):
    opt.zero_grad(); model(torch.randn(16, 8)).pow(2).mean().backward(); opt.step()
print("sum", float(sum(p.sum() for p in model.parameters())), flush=True)
if dist.get_rank() == 0 and Path("o/run.json").exists():
    url, deadline = json.loads(Path("o/run.json").read_text())["metrics_url"], time.monotonic() + 200
    while time.monotonic() < deadline:  # what is said in a run's first minute comes before it ends
        text = re.sub(r',run="[^"]*",run_id="[^"]*"', "", urllib.request.urlopen(url).read().decode())
        seen = text + Path("/proc/self/fd/2").read_text()
        if all(word in seen for word in sys.argv[1:]):
            break
        time.sleep(0.1)
    print(text, file=sys.stderr)
dist.barrier(); dist.destroy_process_group()
"""
_BY_HAND = """
import torch
weight = torch.randn(4, 2, requires_grad=True)  # no module has it
for i in range(20):
    (torch.randn(8, 4) @ weight).pow(2).mean().backward()
    with torch.no_grad(): weight.add_(weight.grad, alpha=-0.1); weight.grad = None
"""
_SPAWN = """
import multiprocessing
if __name__ == "__main__":
    children = [multiprocessing.get_context("spawn").Process(target=print) for _ in range(2)]
    [child.start() for child in children]; [child.join() for child in children]
"""
_ODD = """
import torch
class Odd(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))
odd, plain = torch.randn(4).as_subclass(Odd).requires_grad_(), torch.nn.Parameter(torch.randn(4))
opt = torch.optim.SGD([odd, plain], lr=0.1, foreach=False)
for i in range(8):
    opt.zero_grad(); plain.pow(2).sum().backward(); opt.step()
"""
#: Soon after the first step; until then the ranks have gone as far in their meeting as they will.
_SOON = "from ddpdebug.monitor import covering as c; c.STEP_SECONDS, c._LOOK_SECONDS = 6.0, 0.2\n"
_WALL = (
    _SOON
    + """
import time
from ddpdebug import torch_internals
class Blocked:
    def __init__(self, *args):
        while True: time.sleep(1)
torch_internals.GlooGroup = Blocked
"""
)
_BROKEN = (
    _SOON
    + """
from ddpdebug.probes.nonfinite import Numerics
def fail(*args): raise ValueError("on purpose")
Numerics.before_step = fail
"""
)
_OPTIONS = ["--out", "o", "--metrics-port", "0"]
#: What the job waits for before it ends.
_APART = ["nothing is compared", 'ddpdebug_checks_off{part="ranks",rank="0"} 1.0']
Job = dict[str, Any]
_JOBS: dict[str, Job] = {
    "plain": {"text": _TRAIN, "options": None},
    "wall": {"text": _TRAIN, "options": _OPTIONS, "inject": {"0": _WALL, "1": _WALL}, "args": _APART},
    "without": {
        "text": _TRAIN,
        "options": {"0": _OPTIONS, "1": None},
        "inject": {"0": _SOON},
        "args": _APART,
    },
    "broken": {
        "text": _TRAIN,
        "options": _OPTIONS,
        "inject": {"0": _BROKEN, "1": _SOON},
        "args": ['ddpdebug_checks_off{part="numerics",rank="0"} 2.0', 'ddpdebug_ranks_compared{rank="0"} 2.0'],
    },
    "by hand": {"text": _BY_HAND, "options": _OPTIONS, "ranks": 1},
    "spawn": {"text": _SPAWN, "options": _OPTIONS, "ranks": 1},
    "odd": {"text": _ODD, "options": _OPTIONS, "ranks": 1},
}


@pytest.fixture(scope="module")
def results(
    run_jobs: Callable[[list[Job]], list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[dict[str, Any]], Path]]:
    """Run all of them once."""
    jobs = []
    for number, job in enumerate(_JOBS.values()):
        folder = tmp_path_factory.mktemp(f"silence{number}")
        (folder / "script.py").write_text(job["text"])
        jobs.append({**job, "script": str(folder / "script.py"), "cwd": str(folder)})
    done = run_jobs(jobs)
    return {name: (done[i], Path(jobs[i]["cwd"]) / "o") for i, name in enumerate(_JOBS)}


def _record(directory: Path) -> Coverage:
    known = Coverage.from_json(json.loads((directory / "run.json").read_text())["coverage"])
    assert known is not None
    return known


def _verdict(directory: Path) -> Verdict:
    return judge_directory(directory, None, "error")


@pytest.mark.parametrize(
    "name, text",
    [
        ("wall", "nothing is compared between the ranks: the ranks found each other but cannot connect"),
        ("without", "nothing is compared between the ranks: rank 1 did not come (started without ddpdebug?)"),
    ],
)
def test_ranks_that_never_meet(results: dict[str, Any], name: str, text: str) -> None:
    """The job trains the same, hears it while it trains, and nothing calls it clean."""
    ranks, directory = results[name]
    plain, _ = results["plain"]
    assert [rank["status"] for rank in ranks] == [0, 0], ranks[0]["err"]
    assert [rank["out"] for rank in ranks] == [rank["out"] for rank in plain]
    err = ranks[0]["err"]
    assert f"ddpdebug: {text}" in err
    assert err.index(f"ddpdebug: {text}") < err.index("ddpdebug_coverage_complete")  # before the script's end
    assert "nothing is compared" not in ranks[1]["err"]  # once per node
    assert " not checked: nothing is compared between the ranks" in err
    assert 'ddpdebug_coverage_complete{rank="0"} 0.0' in err
    assert 'ddpdebug_ranks_compared{rank="0"} 0.0' in err
    assert 'ddpdebug_checks_off{part="ranks",rank="0"} 1.0' in err
    assert _record(directory).gaps[0].part == "ranks"
    assert _record(directory).steps == 24
    verdict = _verdict(directory)
    assert (verdict.word, verdict.exit_code) == (Word.UNCHECKED, 0)


def test_a_probe_that_is_off(results: dict[str, Any]) -> None:
    """One line, and the rest is compared: a part is missing, not everything."""
    ranks, directory = results["broken"]
    assert [rank["out"] for rank in ranks] == [rank["out"] for rank in results["plain"][0]]
    err = ranks[0]["err"]
    assert "probe:numerics has switched itself off: ValueError: on purpose" in err
    assert "nothing is compared" not in err
    assert 'ddpdebug_checks_off{part="numerics",rank="0"} 2.0' in err  # it, and what judges by it
    assert 'ddpdebug_ranks_compared{rank="0"} 2.0' in err
    assert sorted(gap.text for gap in _record(directory).missed) == [
        "probe:numerics is off on rank 0: ValueError: on purpose",
        "probe:numerics-after is off on rank 0: it needs probe:numerics, which is off",
    ]
    assert _verdict(directory).word is Word.UNCHECKED


@pytest.mark.parametrize(
    "name, text",
    [
        ("by hand", "no optimizer step was completed, although backward ran 20 times"),
        ("spawn", "no optimizer step was seen: the script has started 2 processes of its own"),
        ("odd", "1 parameter not compared: of the type Odd"),
    ],
)
def test_one_process(results: dict[str, Any], name: str, text: str) -> None:
    """The last line says it, run.json has it, the verdict is not clean."""
    ranks, directory = results[name]
    assert ranks[0]["status"] == 0, ranks[0]["err"]
    assert f"not checked: {text}" in ranks[0]["err"]
    assert _record(directory).missed[0].text.startswith(text)
    assert _verdict(directory).word is Word.UNCHECKED
