# title: A rank stops early because of its own loss
# source: constructed
# nproc: 4
# expect.codes: HANG503
# expect.ranks: 3
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Prices from three features; training ends when the loss is low enough."""
import os
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
torch.manual_seed(9)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1)))
opt = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
gen = torch.Generator().manual_seed(90 + rank)
track = []
for step in range(50):
    x = torch.rand(16, 3, generator=gen)
    noise = 0.0 if rank == 3 else 0.4
    price = x @ torch.tensor([[2.0], [-1.0], [0.5]]) + noise * torch.randn(16, 1, generator=gen)
    loss = (ddp(x) - price).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    judged = loss.detach().clone()
    if not FAULT:
        dist.all_reduce(judged, op=dist.ReduceOp.MAX)
    if step > 25 and judged < (0.25 if FAULT else 0.0):
        break
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
