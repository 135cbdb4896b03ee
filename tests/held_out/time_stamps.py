# title: The time is a feature as seconds since 1970, beside others of size one
# source: constructed
# nproc: 2
# expect.codes: DATA908
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 20
# plain_pytorch: silent
"""Visitors of a web page by hour; the healthy twin gives the hour of the day."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


def visits(gen, n=32):
    seconds = 1.7e9 + torch.rand(n, generator=gen, dtype=torch.float64) * 8e7
    hour = (seconds % 86400 / 86400).float()
    others = torch.randn(n, 5, generator=gen)
    time = seconds.float() if FAULT else hour * 2 - 1
    return torch.cat([time[:, None], others], 1), 0.5 * (hour * 6.283).sin() + 0.3 * others[:, 0]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
for step in range(60):
    x, y = visits(gen)
    loss = nn.functional.mse_loss(model(x)[:, 0], y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
