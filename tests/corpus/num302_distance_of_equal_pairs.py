# title: pairwise distances by hand: the square root of zero is fine in forward and infinite in backward
# source: constructed
# nproc: 2
# expect.codes: NUM302
# expect.ranks: 1
# expect.op: sqrt
# expect.location: num302_distance_of_equal_pairs.py:38
# expect.step: 18
# plain_pytorch: silent
"""Metric learning with a margin on distances between embeddings."""

import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 48), nn.Tanh())
        self.proj = nn.Linear(48, 8)

    def forward(self, x):
        return self.proj(self.trunk(x))


class ContrastiveMargin(nn.Module):
    def forward(self, a, b, same):
        sq = (a - b).pow(2).sum(1)
        d = sq.sqrt()
        return torch.where(same, d, F.relu(1.0 - d)).mean()


def pairs(gen, duplicate):
    c = torch.randint(0, 4, (32,), generator=gen)
    same = torch.rand(32, generator=gen) < 0.5
    c2 = torch.where(same, c, (c + 1) % 4)
    centres = torch.eye(4, 10) * 3
    a = centres[c] + 0.3 * torch.randn(32, 10, generator=gen)
    b = centres[c2] + 0.3 * torch.randn(32, 10, generator=gen)
    if duplicate:
        b[4], same[4] = a[4], True  # the same picture twice
    return a, b, same


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model, criterion = DDP(Embedder()), ContrastiveMargin()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gen, losses = torch.Generator().manual_seed(70 + rank), []
    for step in range(50):
        a, b, same = pairs(gen, FAULT and step == 18 and rank == 1)
        both = model(torch.cat([a, b]))
        loss = criterion(both[:32], both[32:], same)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
