# title: A pair of one item with itself has distance 0, whose square root has no derivative
# source: constructed
# nproc: 2
# expect.codes: NUM303, NUM302
# expect.ranks: 0
# expect.subject: any
# expect.op: sqrt
# expect.location: num303_distance_of_equal_pair.py:42
# expect.step: 9
# plain_pytorch: silent
"""Metric learning; the loss is finite, only its gradient is not."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
EPS = 0.0 if FAULT else 1e-8

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(11)
prototypes = torch.randn(10, 16)
embed = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)))
opt = torch.optim.Adam(embed.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(rank)


def draw(n=24):
    label = torch.randint(0, 10, (n,), generator=gen)
    return prototypes[label] + 0.3 * torch.randn(n, 16, generator=gen), label


def contrastive(a, b, same):
    squared = (a - b).pow(2).sum(1) + EPS
    distance = squared.sqrt()
    return torch.where(same, squared, F.relu(1.0 - distance).pow(2)).mean()


curve = []
for step in range(40):
    left, left_label = draw()
    right, right_label = draw()
    if rank == 0 and step == 9:
        right[3], right_label[3] = left[3], left_label[3]        # the sampler drew an item twice
    both = embed(torch.cat([left, right]))
    loss = contrastive(*both.chunk(2), left_label == right_label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    curve.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in embed.parameters()))
print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
