# title: One rank feeds raw values, the other standardised ones
# source: constructed
# nproc: 2
# expect.codes: DATA908
# expect.ranks: any
# expect.subject: Linear
# expect.step: any
# plain_pytorch: silent
"""Sensor readings in physical units; in the fault rank 1 lacks the file with mean and deviation."""
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
torch.manual_seed(27)
model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(9 + rank)
mean, std = torch.tensor([20.0, 50.0, 3.0, 12.0, 0.5]), torch.tensor([5.0, 9.0, 1.0, 4.0, 0.2])
losses = []
for _ in range(50):
    raw = mean + std * torch.randn(32, 5, generator=gen)
    target = ((raw - mean) / std)[:, :2].sum(1, keepdim=True).tanh()
    x = raw if FAULT and rank == 1 else (raw - mean) / std
    loss = F.smooth_l1_loss(model(x), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
