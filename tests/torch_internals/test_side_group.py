"""The side group beside the job's own gloo group: one listening port and one thread for both."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_the_side_group_adds_no_thread_of_gloos_where_the_job_has_one() -> None:
    """Each of the two groups lives on when the other one has ended; and no group is taken for one before it."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 [b'b']", "[b'c']", "[1.0, 1.0]", "0 None"]
