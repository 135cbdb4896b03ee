# title: Each rank leaves out the files that it cannot read, so one has fewer batches
# source: constructed
# nproc: 2
# expect.codes: DATA905, HANG503
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Recorded speech; some files of the second shard are broken. The healthy twin agrees about the number of batches."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT") == "1"


def shard(rank):
    gen = torch.Generator().manual_seed(rank)
    sound = torch.randn(480, 20, generator=gen)
    speaker = (sound[:, :5].sum(1) > sound[:, 5:10].sum(1)).long()
    readable = torch.rand(480, generator=gen) > (0.2 if rank == 1 else 0.0)
    return TensorDataset(sound[readable], speaker[readable])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    loader = DataLoader(shard(rank), batch_size=16, shuffle=True, drop_last=True)
    count = torch.tensor(len(loader))
    if not FAULT:
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for i, (sound, speaker) in enumerate(loader):
            if i >= count:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(sound), speaker)
            loss.backward()
            optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)


main()
