# title: A cache fills during the first steps and stays
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Targets of a slow teacher are computed once for each of 24 shards and used again."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(32)
teacher = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256))
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256)))
opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(320 + rank)
targets, track = {}, []
for step in range(80):
    shard = step % 24
    x = torch.randn(1500, 32, generator=torch.Generator().manual_seed(1000 * rank + shard))
    if shard not in targets:
        with torch.no_grad():
            targets[shard] = teacher(x)
    chosen = torch.randint(0, 1500, (400,), generator=gen)
    loss = (ddp(x[chosen]) - targets[shard][chosen]).square().mean()
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
