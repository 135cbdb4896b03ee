# title: All gradients are cleared after the first of two optimizers has stepped, so the second never gets one
# source: constructed
# nproc: 2
# expect.codes: RCP816
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Recommendations: embeddings have an optimizer of their own."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Recommender(nn.Module):
    def __init__(self, users=50, items=40, d=16):
        super().__init__()
        self.users, self.items = nn.Embedding(users, d), nn.Embedding(items, d)
        self.rate = nn.Sequential(nn.Linear(2 * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.rate(torch.cat([self.users(user), self.items(item)], 1))[:, 0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    taste = torch.randn(50, 3) @ torch.randn(3, 40) / 2
    model = nn.parallel.DistributedDataParallel(Recommender())
    module = model.module
    tables = torch.optim.Adam([*module.users.parameters(), *module.items.parameters()], lr=0.02)
    rest = torch.optim.Adam(module.rate.parameters(), lr=0.005)
    gen = torch.Generator().manual_seed(rank)
    for step in range(80):
        user, item = torch.randint(50, (64,), generator=gen), torch.randint(40, (64,), generator=gen)
        loss = nn.functional.mse_loss(model(user, item), taste[user, item])
        loss.backward()
        rest.step()
        (model if FAULT else rest).zero_grad()
        tables.step()
        tables.zero_grad()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
