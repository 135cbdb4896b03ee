# title: A rank whose own validation shard has stalled builds its optimizer afresh
# source: constructed
# nproc: 2
# expect.codes: RANK103, RANK101
# expect.ranks: any
# expect.subject: exp_avg
# expect.step: 20
# plain_pytorch: silent
"""The new object has the same parameters and settings, and no moments."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def build(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = build(model)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(50):
        if step == 20:
            stalled = torch.tensor(float(rank == 1))
            if not FAULT:
                dist.all_reduce(stalled)
            if stalled > 0:
                opt = build(model)
        x = torch.randn(20, 10, generator=gen)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
