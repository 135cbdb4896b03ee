# title: The whole model is bfloat16, where small updates of weights near 1 round away
# source: constructed
# nproc: 2
# expect.codes: HLTH713
# expect.ranks: all
# expect.subject: norm.weight
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""A residual network on tables, cast with `.to(torch.bfloat16)` instead of autocast."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.body(self.norm(x))


def tables(gen, n=64):
    x = torch.randn(n, 16, generator=gen)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    dtype = torch.bfloat16 if FAULT else torch.float32
    model = DDP(nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 2)).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x, y = tables(gen)
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
