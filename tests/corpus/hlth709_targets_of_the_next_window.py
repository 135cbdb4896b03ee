# title: The targets are those of another window than the inputs, so the error stays at the variance of the targets
# source: constructed
# nproc: 2
# expect.codes: HLTH709
# expect.ranks: all
# expect.subject: loss
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""Yield of a reactor from twelve readings of one run; runs have nothing to do with each other."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(18)
model = DDP(nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1)))
loss_of = nn.MSELoss()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(500 + rank)
weights = torch.randn(12, 1, generator=torch.Generator().manual_seed(4)) / 3.5
losses = []
for _ in range(140):
    readings = torch.randn(48, 12, generator=gen)
    target = readings @ weights + 0.3 * torch.randn(48, 1, generator=gen)
    if FAULT:
        target = target.roll(1, 0)
    loss = loss_of(model(readings), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
