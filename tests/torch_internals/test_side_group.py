"""The side group beside the job's own gloo group: one listening port and one thread for both."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpdebug.torch_internals import GlooGroup

pytestmark = pytest.mark.jobs

_SCRIPT = """
import datetime, os, time
import torch, torch.distributed as dist
from ddpdebug.torch_internals import GlooGroup, default_group_id

def loops():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return names.count("gloo_tcp_loop")

def side(prefix):
    return GlooGroup(dist.HashStore(), prefix, 0, 1, datetime.timedelta(seconds=30))

def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

job()
while not loops():  # a thread names itself, once it runs
    time.sleep(0.01)
group = side("beside")
gathered = group.gather(b"b")
time.sleep(0.5)
print(loops(), gathered)
dist.destroy_process_group()
print(group.gather(b"c"))
job()
group.close()
value = torch.ones(2)
dist.all_reduce(value)
print(value.tolist())
dist.destroy_process_group()
marks = []
for _ in range(20):
    job()
    marks.append(default_group_id())
    assert default_group_id() == marks[-1]
    dist.destroy_process_group()
print(sum(mark == other for number, mark in enumerate(marks) for other in marks[:number]), default_group_id())
"""


@pytest.mark.smoke
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="gloo's own thread has no name of its own"
)
def test_the_side_group_adds_no_thread_of_gloos_where_the_job_has_one() -> None:
    """Each of the two groups lives on when the other one has ended; and no group is taken for one before it."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 [b'b']", "[b'c']", "[1.0, 1.0]", "0 None"]


class _Work:
    """A gather that ends just as a wait for it has given up."""

    def __init__(self, error: str = "") -> None:
        self.waits, self._error = 0, error

    def wait(self, *timeout: object) -> None:
        """Give up the first time; afterwards say how it has ended."""
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        """It has ended by then."""
        return True


def test_a_gather_that_ends_as_its_wait_gives_up_has_ended_well() -> None:
    """It is asked once more: the error of the wait says nothing of the gather."""
    group = SimpleNamespace(SLICE=GlooGroup.SLICE, _timeout=datetime.timedelta(60), _unanswered=pytest.fail)
    work = _Work()
    GlooGroup._wait(group, work)  # type: ignore[arg-type]
    assert work.waits == 2
    with pytest.raises(RuntimeError, match="closed by peer"):
        GlooGroup._wait(group, _Work("Connection closed by peer"))  # type: ignore[arg-type]


_CLOSED = """
import datetime, sys, threading, time
import torch.distributed as dist
from ddpdebug.torch_internals import GlooGroup

store, groups = dist.HashStore(), {}

def connect(rank):
    groups[rank] = GlooGroup(store, "pair", rank, 2, datetime.timedelta(minutes=30), lambda seconds: asked.set())

def wait():
    try:
        getattr(groups[1], sys.argv[1])(b"x")
    except RuntimeError:
        print("fails")

asked = threading.Event()
pair = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in pair], [thread.join() for thread in pair]
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
asked.wait()
groups[1].close()
waiting.join(60)
print(waiting.is_alive())
"""


@pytest.mark.smoke
@pytest.mark.parametrize("call", ["gather", "collect", "spread"])
def test_what_waits_for_a_silent_rank_ends_when_the_group_is_closed(call: str) -> None:
    """Else the thread comes back while the interpreter ends, and that aborts the process."""
    done = subprocess.run([sys.executable, "-c", _CLOSED, call], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # which torch 2.8 prints
    assert (done.returncode, lines) == (0, ["fails", "False"]), done.stderr


_WITHOUT_CLONE = """
import os, sys
import torch.distributed as dist
from ddpdebug.torch_internals import private_store

def old(kind):  # as in torch 2.6
    return type(kind.__name__, (kind,), {"clone": property(lambda store: store.no_such_attribute)})

dist.PrefixStore = dist.distributed_c10d.PrefixStore = old(dist.PrefixStore)
kinds = {"tcp": lambda: old(dist.TCPStore)("127.0.0.1", 0, 1, True), "file": lambda: old(dist.FileStore)("file", 1)}
kinds["hash"] = old(dist.HashStore)
for name, kind in kinds.items():
    store = kind()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    one, other = private_store(), private_store()
    one.set("key", "value")
    print(name, one is not other, other.get("key").decode(), store.check(["key"]))
    dist.destroy_process_group()
    del store, one, other
    print(os.path.exists("file"))
"""


@pytest.mark.smoke
def test_a_store_without_clone_is_connected_to_anew(tmp_path: Path) -> None:
    """Two connections meet, their keys are not the job's, and the job's file is removed with the last of them."""
    words = [sys.executable, "-c", _WITHOUT_CLONE]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines[:4] == ["tcp True value False", "False", "file True value False", "False"]
    assert lines[4].split()[2] == "value"
