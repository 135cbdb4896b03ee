# title: The order of an epoch comes from a generator that is seeded anew in every epoch
# source: constructed
# nproc: 2
# expect.codes: DATA902
# expect.ranks: all
# expect.subject: any
# expect.step: 12
# expect.step_slack: 40
# plain_pytorch: silent
"""Batches are cut from a list of indices by hand, without a loader."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


def batches(n, epoch, rank, world, size=16):
    order = list(range(n))
    random.Random(17 if FAULT else 17 + epoch).shuffle(order)
    mine = order[rank::world]
    for i in range(0, len(mine), size):
        yield mine[i : i + size]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    x = torch.randn(384, 14)
    y = (x @ torch.randn(14, 3)).argmax(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(5):
        for index in batches(384, epoch, rank, world):
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
