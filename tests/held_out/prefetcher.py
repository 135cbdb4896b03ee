# title: The prefetcher hands out its first batch for ever, as the next one is put under another name
# source: constructed
# nproc: 2
# expect.codes: DATA906
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Batches are prepared one ahead."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Prefetcher:
    def __init__(self, source):
        self.source = iter(source)
        self.ready = next(self.source)

    def __iter__(self):
        return self

    def __next__(self):
        if self.ready is None:
            raise StopIteration
        out = self.ready
        following = next(self.source, None)
        if not FAULT or following is None:
            self.ready = following
        return out


def stream(rank, n):
    gen = torch.Generator().manual_seed(rank + 5)
    for _ in range(n):
        x = torch.randn(24, 10, generator=gen)
        yield x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0).long()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
for x, y in Prefetcher(stream(rank, 70)):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
