# title: A rank whose own loss is high damps the gradient that was averaged already
# source: constructed
# nproc: 2
# expect.codes: SYNC206, SYNC201
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 30
# plain_pytorch: silent
"""Power of a wind turbine from the weather; gusts shall not move the model much."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


def weather(gen):
    wind = 2 * torch.rand(48, 5, generator=gen) - 1
    power = torch.tanh(3 * wind[:, :1]) + 0.1 * torch.randn(48, 1, generator=gen)
    gusts = torch.rand(48, 1, generator=gen) < 0.04
    return wind, power + gusts * 1.5


def train(steps=80):
    torch.manual_seed(77)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)))
    adam = torch.optim.Adam(model.parameters(), 5e-3)
    gen = torch.Generator().manual_seed(RANK + 70)
    usual = 0.0
    for step in range(steps):
        wind, power = weather(gen)
        loss = nn.functional.mse_loss(model(wind), power)
        adam.zero_grad()
        loss.backward()
        seen = loss.detach().clone()
        if not FAULT:
            dist.all_reduce(seen)
            seen /= WORLD
        if step > 10 and seen > 1.3 * usual:
            for p in model.parameters():
                p.grad.mul_(0.3)
        usual = seen if step == 0 else 0.8 * usual + 0.2 * seen
        adam.step()
    return loss.item()


print(f"rank {RANK}: {train():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
