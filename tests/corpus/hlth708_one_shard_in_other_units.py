# title: One batch of a corrupt shard has its targets in other units; the loss jumps and comes back
# source: constructed
# nproc: 2
# expect.codes: HLTH708
# expect.ranks: all
# expect.subject: any
# expect.step: 34
# expect.step_slack: 0
# plain_pytorch: silent
"""Forecast of the next hour's load from the last twelve."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def load(gen, n=32):
    phase = 6.2832 * torch.rand(n, 1, generator=gen)
    hours = torch.arange(13.0)
    curve = 1 + 0.5 * torch.sin(phase + hours / 4) + 0.05 * torch.randn(n, 13, generator=gen)
    return curve[:, :12], curve[:, 12]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(12, 40), nn.SiLU(), nn.Linear(40, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(60 + rank)
    losses = []
    for step in range(60):
        past, future = load(gen)
        if FAULT and step == 34:
            future = 10 * future
        loss = F.mse_loss(model(past)[:, 0], future)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
