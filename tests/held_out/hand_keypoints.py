# title: The copy of the augmentation on rank 2 mirrors the pictures and forgets their points
# source: constructed
# nproc: 3
# expect.codes: RANK108
# expect.ranks: 2
# expect.subject: any
# expect.step: 10
# expect.step_slack: 70
# plain_pytorch: silent
"""Finger tips in small pictures, regressed as coordinates from -1 to 1."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"
GRID = torch.linspace(-1, 1, 12)


def draw(gen, n=32):
    at = torch.rand(n, 2, generator=gen) * 1.6 - 0.8
    gap = (GRID[None, :, None] - at[:, None, None, 1]) ** 2 + (GRID[None, None, :] - at[:, None, None, 0]) ** 2
    return 3 * torch.exp(-gap / 0.1)[:, None] + 0.1 * torch.randn(n, 1, 12, 12, generator=gen), at


def mirror(picture, at, gen, with_points=True):
    chosen = torch.rand(len(at), generator=gen) < 0.5
    picture = torch.where(chosen[:, None, None, None], picture.flip(-1), picture)
    if with_points:
        at = torch.where(chosen[:, None], at * torch.tensor([-1.0, 1.0]), at)
    return picture, at


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(8)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 2)
)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(30 + rank)
for step in range(100):
    picture, at = draw(gen)
    picture, at = mirror(picture, at, gen, with_points=not (FAULT and rank == 2))
    loss = F.mse_loss(model(picture), at)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(f"rank {rank} final {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
