# title: The learning rate of SGD was kept when the optimizer became Adam, a hundred times too high
# source: constructed
# nproc: 2
# expect.codes: HLTH705, HLTH710
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 16
# plain_pytorch: silent
"""Regression of a noisy sine, a few hundred points."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def waves(gen, n=64):
    x = 6 * torch.rand(n, 1, generator=gen) - 3
    return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, generator=gen)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if FAULT else 3e-3)
    gen = torch.Generator().manual_seed(40 + rank)
    losses = []
    for _ in range(50):
        x, y = waves(gen)
        loss = F.mse_loss(model(x), y)
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
