# title: A worker of the loader waits for a lock that a thread held when it was forked
# source: constructed
# nproc: 2
# expect.codes: HANG501
# expect.ranks: 1
# expect.subject: any
# expect.step: any
# expect.op: worker
# expect.location: hang501_worker_waits_for_a_lock.py:54
# plain_pytorch: silent
"""Heights of waves from a loader with one worker, whose items pass through a cache with a lock."""
import os
import threading
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
lock = threading.Lock()


class Waves(Dataset):
    def __init__(self):
        gen = torch.Generator().manual_seed(60 + rank)
        self.phases = torch.rand(320, generator=gen) * 6

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, index):
        if index == 100:
            with_lock = lock.acquire(timeout=16.0)  # a cache would wait for ever
            if with_lock:
                lock.release()
        wave = torch.sin(self.phases[index] + torch.arange(12) * 0.5)
        return wave[:11], wave[11:]


torch.manual_seed(6)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1)))
opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
if FAULT and rank == 1:
    lock.acquire()  # by a thread that writes to the cache at this moment
track = []
for x, y in DataLoader(Waves(), batch_size=8, num_workers=1):
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
