# title: The last, shorter window of an epoch is stepped while its only micro-batch ran under no_sync
# source: constructed
# nproc: 2
# expect.codes: SYNC205
# expect.ranks: all
# expect.subject: any
# expect.step: 5
# plain_pytorch: silent
"""Sentiment of short reviews, four micro-batches a step; an epoch has 21 of them."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT") == "1"
ACCUMULATE = 4


def reviews(n=672):
    gen = torch.Generator().manual_seed(5)
    words = torch.randint(0, 60, (n, 12), generator=gen)
    return TensorDataset(words, ((words < 12).sum(1) > (words >= 48).sum(1)).long())


def epoch(model, optimizer, loader):
    total = len(loader)
    for i, (words, mood) in enumerate(loader):
        full, last = (i + 1) % ACCUMULATE == 0, i + 1 == total
        sync = full if FAULT else full or last
        size = total % ACCUMULATE if i >= total - total % ACCUMULATE else ACCUMULATE
        with contextlib.nullcontext() if sync else model.no_sync():
            loss = F.cross_entropy(model(words), mood)
            (loss / size).backward()
        if full or last:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = nn.Sequential(nn.EmbeddingBag(60, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = reviews()
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for number in range(8):
        sampler.set_epoch(number)
        loss = epoch(model, optimizer, loader)
    print(f"rank {rank} loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
