# title: The forward loops over all but the last block of the stack
# source: constructed
# nproc: 2
# expect.codes: SYNC207
# expect.ranks: all
# expect.subject: blocks.3
# expect.step: any
# plain_pytorch: silent
"""Residual blocks between an input and an output layer; unused parameters are allowed for a later feature."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, d=24, depth=4):
        super().__init__()
        self.depth = depth
        self.first, self.last = nn.Linear(7, d), nn.Linear(d, 3)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for i in range(self.depth - 1 if FAULT else self.depth):
            x = self.blocks[i](x)
        return self.last(x)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Stack(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_fn = nn.SmoothL1Loss()
    gen = torch.Generator().manual_seed(rank)
    for step in range(60):
        x = torch.randn(32, 7, generator=gen)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3:].sum(1) / 2], 1)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
