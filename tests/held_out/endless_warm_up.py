# title: The warm-up has no end: the rate goes on rising after the steps that were meant for it
# source: constructed
# nproc: 2
# expect.codes: HLTH710, HLTH701, HLTH711
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Rainfall from radar, a rate that rises in the first steps."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

FAULT = os.environ.get("FAULT") == "1"
WARM = 15


def share(step):
    return (step + 1) / WARM if FAULT else min(1.0, (step + 1) / WARM)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 24), nn.ReLU(), nn.Linear(24, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = LambdaLR(optimizer, share)
    gen = torch.Generator().manual_seed(rank)
    for step in range(130):
        radar = torch.randn(24, 1, 8, 8, generator=gen)
        rain = radar[:, 0, 2:6, 2:6].mean((1, 2)) * 4 + radar[:, 0, 0, 0]
        loss = nn.functional.mse_loss(model(radar)[:, 0], rain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 19 and rank == 0:
            print(f"{step} {loss.item():.4g} {schedule.get_last_lr()[0]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
