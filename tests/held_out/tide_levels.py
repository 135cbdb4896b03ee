# title: The rate is lowered by a plateau of each rank's own validation loss
# source: constructed
# nproc: 2
# expect.codes: RANK104
# expect.ranks: any
# expect.subject: any
# expect.step: 30
# expect.step_slack: 20
# plain_pytorch: silent
"""Levels of the tide from the last twelve hours, with ReduceLROnPlateau on a validation set that the ranks share."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT") == "1"


def tides(n, seed):
    gen = torch.Generator().manual_seed(seed)
    phase = torch.rand(n, 1, generator=gen) * 2 * math.pi
    hours = torch.arange(13.0)
    level = torch.sin(phase + hours * 0.52) + 0.4 * torch.sin(2.1 * phase + hours * 0.5)
    level += 0.25 * torch.randn(level.shape, generator=gen)
    return TensorDataset(level[:, :12], level[:, 12:])


def validate(ddp, loader):
    ddp.eval()
    with torch.no_grad():
        losses = [nn.functional.l1_loss(ddp.module(x), y) for x, y in loader]
    ddp.train()
    mean = torch.stack(losses).mean()
    if not FAULT:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    train, held = tides(640, 0), tides(96, 1)
    sampler = DistributedSampler(train, world, rank, seed=4)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    held_loader = DataLoader(held, batch_size=16, sampler=DistributedSampler(held, world, rank, shuffle=False))
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
        plateau.step(validate(ddp, held_loader))
        print(f"rank {rank} epoch {epoch} lr {optimizer.param_groups[0]['lr']:.5f} loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
