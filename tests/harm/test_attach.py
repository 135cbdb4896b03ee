"""Attaching costs nothing that is not needed, leaves nothing behind, and works without any process group."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Python = Callable[..., subprocess.CompletedProcess[str]]

_WATCH = """
import gc, sys, threading, time, weakref
import torch, ddpdebug
def until(look):
    deadline = time.monotonic() + 200
    while not look() and time.monotonic() < deadline:
        time.sleep(0.02)
    return look()
def alone():
    return [thread.name for thread in threading.enumerate()] == ["MainThread"]
def alive(refs):
    gc.collect()
    return [type(r()).__name__ for r in refs if r() is not None]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def _run(python: Python, source: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = python(source, cwd)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.smoke
def test_import_is_light(python: Python, tmp_path: Path) -> None:
    """`import ddpdebug` loads nothing heavy, starts no thread, prints nothing."""
    source = """
import sys, threading
before = set(sys.modules)
import ddpdebug
loaded = sys.modules.keys() - before
heavy = {"torch", "numpy", "rich", "click", "prometheus_client", "xxhash", "asyncio"} & sys.modules.keys()
assert not heavy, heavy
assert threading.active_count() == 1
assert len(loaded) < 60, loaded
"""
    done = _run(python, source, tmp_path)
    assert done.stdout + done.stderr == ""


@pytest.mark.smoke
def test_one_process(python: Python, tmp_path: Path) -> None:
    """A plain module in one process is watched: steps are recorded, and nothing is found."""
    source = (
        _WATCH
        + """
with ddpdebug.watch(model, optimizer, out="run", metrics="off") as monitor:
    train(model, optimizer)
    assert monitor.findings == []
monitor.close()
monitor.close()
assert until(alone), threading.enumerate()  # one that ends needs its turn
train(model, optimizer)
"""
    )
    done = _run(python, source, tmp_path)
    assert done.stdout == ""
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["world"], run["outcome"]["reason"], run["outcome"]["steps"]) == (1, "finished", {"0": 3})
    assert (tmp_path / "run" / "findings.jsonl").read_text() == ""


def test_no_optimizer_step(python: Python, tmp_path: Path) -> None:
    """A script that never steps an optimizer is told that nothing was judged."""
    (tmp_path / "script.py").write_text("import torch; print(torch.ones(2).sum().item())")
    source = "from ddpdebug.commands import main; import sys; sys.exit(main(['run', 'script.py']))"
    done = _run(python, source, tmp_path)
    assert done.stdout == "2.0\n"
    assert "no optimizer step was seen" in done.stderr


@pytest.mark.smoke
def test_close_restores_torch(python: Python, tmp_path: Path) -> None:
    """After `close` every patched attribute is the original, and no hook is left on modules, tensors or optimizers."""
    source = (
        _WATCH
        + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optim
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.distributed.algorithms.model_averaging import averagers
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
owners = [DDP, torch.autograd, torch.amp.GradScaler, torch.nn.utils, torch.nn.Module, torch.optim.Optimizer, dist,
          torch.utils.data.DataLoader, _BaseDataLoaderIter, averagers.PeriodicModelAverager, torch.nn.modules.module,
          optim, sys, threading]
def state():
    hooks = [len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks)]
    return [{k: v for k, v in vars(o).items() if not k.startswith("__") and callable(v)} for o in owners], hooks
def hooked(model):
    found = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    return found + [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
before = state()
ddp = DDP(model)
monitor = ddpdebug.watch(ddp, optimizer, out="run", metrics="off")
assert state() != before
train(ddp, optimizer)
assert hooked(ddp)
monitor.close()
assert hooked(ddp) == []
after = state()
for owner, a, b in zip(owners, before[0], after[0]):
    assert {k: (a.get(k), v) for k, v in b.items() if a.get(k) is not v} == {}, owner
assert before[1] == after[1]
assert until(alone), threading.enumerate()
del ddp; gc.collect(); dist.destroy_process_group()
"""
    )
    _run(python, source, tmp_path)


def test_models_are_collected(python: Python, tmp_path: Path) -> None:
    """Models that are dropped under a monitor are freed, and so are the memory and hooks that watching them took."""
    source = (
        _WATCH
        + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
monitor = ddpdebug.watch(None, out="run", metrics="off")
def once(width):
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4))
    ddp = DDP(model)
    train(ddp, torch.optim.Adam(ddp.parameters()), 2)
    return [weakref.ref(o) for o in (ddp, model, *model.parameters())]
refs = [r for i in range(8) for r in once(8)]
last = once(8)
assert until(lambda: not alive(refs)), alive(refs)
assert until(lambda: set(alive(last)) <= {"Parameter"}), alive(last)  # a small model may stay for a last look
large = once(1 << 18)
assert until(lambda: not alive(large)), alive(large)  # a large one does not
assert sum(len(w.params) for w in monitor.probes.state.watches) <= 4
assert len(monitor.probes.hooks._handles) <= 8
monitor.close()
dist.destroy_process_group()
"""
    )
    _run(python, source, tmp_path)


def test_closed_monitor_is_collected(python: Python, tmp_path: Path) -> None:
    """What a fork or the exit would call does not keep a closed monitor alive; another one can follow."""
    source = (
        _WATCH
        + """
import os
refs = []
for i in range(3):
    monitor = ddpdebug.watch(model, optimizer, out=f"run{i}", metrics="off")
    train(model, optimizer)
    monitor.close()
    refs.append(weakref.ref(monitor))
del monitor
assert until(lambda: len(alive(refs)) <= 1), refs  # the module remembers the last one
"""
    )
    _run(python, source, tmp_path)
    assert len(list(tmp_path.glob("run*/run.json"))) == 3


def test_fork_lets_go(python: Python, tmp_path: Path) -> None:
    """A forked child has the originals back, writes nothing and closes nothing; the parent goes on."""
    source = (
        _WATCH
        + """
import os
original = torch.autograd.backward
monitor = ddpdebug.watch(model, optimizer, out="run", metrics="off")
train(model, optimizer)
pid = os.fork()
if pid == 0:
    ok = torch.autograd.backward is original and monitor.closed
    train(model, optimizer)
    monitor.close()
    os._exit(0 if ok else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not monitor.closed
train(model, optimizer)
monitor.close()
"""
    )
    _run(python, source, tmp_path)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["outcome"]["steps"] == {"0": 6}


def test_dead_exchange_holds_nothing(python: Python, tmp_path: Path) -> None:
    """Steps that nobody fetches any more do not pile up: after the group has died, and when it never came up."""
    source = """
from ddpdebug.exchange.ticks import MEET_SECONDS, Exchange, _MAX_WAITING
import threading
lost = []
def dies(*_): raise RuntimeError("dead")
exchange = Exchange(0, 2, dies, lambda tick: False, lost.append)
exchange.start()
exchange._thread.join()
for _ in range(10): exchange.post(b""); exchange.say({})
assert len(lost) == 1 and not exchange._rows and not exchange._outbox
gate = threading.Event()
def waits(*_): gate.wait(); raise RuntimeError("dead")
exchange = Exchange(0, 2, waits, lambda tick: False, lost.append)
exchange.start()
for _ in range(3 * _MAX_WAITING): exchange.post(b"")
assert len(lost) == 1 and len(exchange._rows) == _MAX_WAITING  # the others may still come: the newest are kept
exchange._started -= 2 * MEET_SECONDS
exchange.post(b"")
assert len(lost) == 2 and not exchange._rows
joined = []
exchange._thread.join = joined.append
assert not exchange.close()  # waits for nobody: the gate is still shut
assert sum(joined) < 1, joined
gate.set()
"""
    _run(python, source, tmp_path)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "line, status, says",
    [
        (["run", "missing.py"], 2, "does not exist"),
        (["run", "--bugdet", "1", "script.py"], 2, "--bugdet"),
        (["run", "--budget", "much", "script.py"], 2, "budget"),
        (["run"], 2, "no script given"),
        (["run", "--out", "script.py", "script.py"], 2, "--out"),
    ],
)
def test_wrong_usage(line: list[str], status: int, says: str, python: Python, tmp_path: Path) -> None:
    """Wrong usage is a message and status 2 before anything runs, never a traceback."""
    (tmp_path / "script.py").write_text("print('ran')")
    done = python(f"from ddpdebug.commands import main; import sys; sys.exit(main({line!r}))", tmp_path)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert says in done.stderr
    assert "Traceback" not in done.stderr
