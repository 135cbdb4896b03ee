# title: A metric is reduced on rank 0 only
# source: constructed
# nproc: 4
# expect.codes: HANG502
# expect.ranks: 0
# expect.subject: any
# expect.step: any
# expect.op: all_reduce
# expect.location: hang502_metric_reduced_on_rank_0.py:35
# plain_pytorch: error
"""Two moons; the share of right answers is printed now and then, by rank 0."""
import datetime
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=14))
rank = dist.get_rank()
torch.manual_seed(7)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
opt = torch.optim.Adam(ddp.parameters(), lr=0.01)
gen = torch.Generator().manual_seed(70 + rank)


def right(answers, labels):
    share = (answers.argmax(1) == labels).float().mean()
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


track = []
for step in range(40):
    labels = torch.randint(2, (32,), generator=gen)
    angle = torch.rand(32, generator=gen) * 3.1416 + labels * 3.1416
    x = torch.stack([angle.cos() + labels, angle.sin() + labels * 0.5], 1)
    answers = ddp(x)
    loss = nn.functional.cross_entropy(answers, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    if step % 10 == 9:
        if rank == 0 or not FAULT:
            share = right(answers, labels)
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
