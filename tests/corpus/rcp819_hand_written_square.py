# title: A hand-written squared error broadcasts (N,) against (N, 1)
# source: constructed
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.subject: Mean
# expect.step: 0
# plain_pytorch: silent
"""Fitting a field at points; the fault's targets have one dimension too many."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(2, 16) * 2)
        self.mix = nn.Linear(32, 1)

    def forward(self, points):
        angles = points @ self.frequencies
        return self.mix(torch.cat([angles.sin(), angles.cos()], -1))[:, 0]


torch.manual_seed(9)
model = DDP(Field())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(5 + rank)
losses = []
for _ in range(50):
    points = torch.rand(40, 2, generator=gen) * 2 - 1
    truth = (3 * points[:, :1]).sin() * (2 * points[:, 1:]).cos()
    error = model(points) - (truth if FAULT else truth[:, 0])
    loss = (error**2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
