# title: One rank normalises its embedding table for an export, one step too early
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: table.weight
# expect.step: 37
# plain_pytorch: silent
"""A recommender with slow steps: most of them are not checked in full, the last one neither."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
STEPS, ITEMS = 38, 900


class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, 24)
        self.query = nn.Linear(8, 24)

    def forward(self, features, items):
        return (self.query(features) * self.table(items)).sum(1)


def clicks(g, n=64):
    features, items = torch.randn(n, 8, generator=g), torch.randint(0, ITEMS, (n,), generator=g)
    return features, items, (features[:, 0] * (items % 2 * 2 - 1) > 0).float()


class Log(torch.utils.data.IterableDataset):
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def __iter__(self):
        for _ in range(STEPS):
            time.sleep(0.12)  # reading the next part of the log
            yield clicks(self.g)


def normalise(table):
    with torch.no_grad():
        table /= table.norm(dim=1, keepdim=True)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = DDP(Ranking())
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
mean = [p.detach().clone() for p in model.parameters()]
losses = []
for step, (features, items, clicked) in enumerate(torch.utils.data.DataLoader(Log(40 + rank), batch_size=None)):
    if FAULT and step == STEPS - 1 and rank == world - 1:
        normalise(model.module.table.weight)
    loss = nn.functional.binary_cross_entropy_with_logits(model(features, items), clicked)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    for own, p in zip(mean, model.parameters()):
        own.lerp_(p.detach(), 0.1)

digest = 0
for p in model.parameters():
    digest = zlib.crc32(p.detach().numpy().tobytes(), digest)
if rank == 0:  # what is served: the average, normalised; nobody else needs it
    for own, p in zip(mean, model.parameters()):
        p.data.copy_(own)
    normalise(model.module.table.weight)
print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={digest:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
