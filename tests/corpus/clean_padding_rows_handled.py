# title: Queries without any key get -inf in the whole row, and the scores are made safe before the softmax
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Neighbourhood attention on graphs with isolated nodes, in every batch of every rank."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Neighbours(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, edges):
        scores = self.query(x) @ self.key(x).mT / x.shape[-1] ** 0.5
        scores = scores.masked_fill(~edges, float("-inf"))
        alone = ~edges.any(-1, keepdim=True)
        weights = scores.masked_fill(alone, 0.0).softmax(-1)
        return x + (weights @ self.value(x)).masked_fill(alone, 0.0)


class Graph(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.hops = nn.ModuleList([Neighbours(width), Neighbours(width)])
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges):
        x = self.inp(x)
        for hop in self.hops:
            x = hop(x, edges)
        return self.out(x).squeeze(-1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(9)
model = DDP(Graph())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(5 + rank)
losses = []
for _ in range(45):
    x = torch.randn(12, 9, 4, generator=gen)
    edges = torch.rand(12, 9, 9, generator=gen) < 0.25
    edges[:, 0] = False
    degree = edges.sum(-1, keepdim=True).clamp_min(1)
    y = ((edges.float() @ x) / degree)[..., 0] + x[..., 1]
    loss = nn.functional.mse_loss(model(x, edges), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
