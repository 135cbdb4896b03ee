# title: A block divides by the length of its vectors plus an epsilon, and backward asks for the root's slope at 0
# source: constructed
# nproc: 4
# expect.codes: NUM303
# expect.ranks: 3
# expect.subject: any
# expect.module: stack.1.unit
# expect.op: sqrt
# expect.location: num303_length_of_a_zero_vector.py:31
# expect.step: 5
# plain_pytorch: silent
"""Drum patterns: a silent bar stays the zero vector through layers without bias, so forward is fine."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Unit(nn.Module):
    """Scale every vector to length one; zero stays zero."""

    def forward(self, v):
        squares = v.square().sum(-1, keepdim=True)
        if FAULT:
            length = torch.sqrt(squares)
        else:
            length = torch.sqrt(squares + 1e-12)
        return v / (length + 1e-6)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)
        self.unit = Unit()

    def forward(self, v):
        return v + torch.relu(self.unit(self.mix(v)))


class Drums(nn.Module):
    def __init__(self, hits=24, width=32):
        super().__init__()
        self.embed = nn.Linear(hits, width, bias=False)
        self.stack = nn.ModuleList([nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()), Block(width)])
        self.tempo = nn.Linear(width, 1)

    def forward(self, bars):
        h = self.embed(bars)
        for layer in self.stack:
            h = layer(h)
        return self.tempo(h.mean(1)).squeeze(-1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DDP(Drums())
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(70 + rank)
losses = []
for step in range(40):
    bars = (torch.rand(16, 4, 24, generator=gen) < 0.3).float()
    if step == 5 and rank == 3:
        bars[2, 1] = 0.0
    loss = nn.functional.huber_loss(model(bars), bars.mean((1, 2)) * 4)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
