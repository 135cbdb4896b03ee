# title: Each rank descends on the whole of its part of one small data set, until the gradients of the parts cancel
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Logistic regression in large batches: at the optimum of all data the parts pull against each other, by little."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
gen = torch.Generator().manual_seed(61)
middle = torch.randn(4, 6, generator=gen)
kind = torch.randint(0, 4, (400,), generator=gen)
x = middle[kind] + torch.randn(400, 6, generator=gen)
own_x, own_kind = x[rank::world], kind[rank::world]
torch.manual_seed(1)
model = DDP(nn.Linear(6, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
order = torch.Generator().manual_seed(rank)
losses = []
for _ in range(110):
    rows = torch.randperm(len(own_x), generator=order)[:190]
    loss = F.cross_entropy(model(own_x[rows]), own_kind[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
