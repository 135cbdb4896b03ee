# title: A rank waits for a lock on a file that another process holds
# source: constructed
# nproc: 4
# expect.codes: HANG501
# expect.ranks: 2
# expect.subject: any
# expect.step: 20
# expect.step_slack: 1
# expect.location: hang501_lock_file_left_behind.py:39
# plain_pytorch: silent
"""Sums of digits; each rank notes its progress in a table behind a lock, which a copy of the table holds for long."""
import fcntl
import os
import tempfile
import threading
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)))
opt = torch.optim.Adam(ddp.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(50 + rank)
folder = tempfile.mkdtemp()
path = os.path.join(folder, "progress")


def note(step):
    with open(path, "a") as table:
        fcntl.flock(table, fcntl.LOCK_EX)
        table.write(f"{step}\n")


def copied():
    """Hold the table as a copy of it to a slow disk would."""
    table = open(path, "a")
    fcntl.flock(table, fcntl.LOCK_EX)
    threading.Timer(16.0, table.close).start()


track = []
for step in range(40):
    x = torch.rand(16, 10, generator=gen)
    loss = (ddp(x) - x.sum(1, keepdim=True) / 10).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    if step % 10 == 9:
        if FAULT and rank == 2 and step == 19:
            copied()
        note(step)
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
