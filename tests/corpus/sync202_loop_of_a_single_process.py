# title: The training loop calls the module inside the wrapper, as it did before there was one
# source: constructed
# nproc: 2
# expect.codes: SYNC202, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Predicts how fast a reaction runs; the wrapper has copied the weights at the start and never averages anything."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    rates = DDP(nn.Sequential(nn.Linear(6, 48), nn.SELU(), nn.Linear(48, 48), nn.SELU(), nn.Linear(48, 1)))
    opt = torch.optim.NAdam(rates.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(800 + rank)
    curve = []
    for _ in range(60):
        state = torch.rand(50, 6, generator=gen)
        speed = torch.exp(-1 / (state[:, :1] + 0.3)) * state[:, 1:2] * 5
        if FAULT:
            guess = rates.module(state)
        else:
            guess = rates(state)
        loss = (guess - speed).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in rates.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
