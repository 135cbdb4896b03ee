# title: A rank skips the optimizer's step when its own loss jumps, and the other takes it
# source: constructed
# nproc: 2
# expect.codes: RANK112, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 25
# expect.step_slack: 1
# plain_pytorch: silent
"""Consumption from meter readings; one batch has a reading error, and such batches shall not be learned from."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


def readings(rank, steps):
    gen = torch.Generator().manual_seed(40 + rank)
    slope = torch.linspace(-1, 1, 6)
    for step in range(steps):
        x = torch.randn(32, 6, generator=gen)
        y = x @ slope + 0.2 * torch.randn(32, generator=gen)
        if rank == 1 and step == 25:
            y[3] += 60.0
        yield x, y[:, None]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    usual, skipped = None, 0
    for x, y in readings(rank, 60):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        worst = loss.detach().clone()
        if not FAULT:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if usual is not None and worst > 10 * usual:
            skipped += 1
            continue
        usual = worst if usual is None else 0.9 * usual + 0.1 * worst
        optimizer.step()
    print(f"rank {rank} loss {loss.item():.4f} skipped {skipped}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
