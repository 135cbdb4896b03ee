# title: The step function holds the unwrapped model, and one rank starts seconds after the other
# source: constructed
# nproc: 2
# expect.codes: SYNC202, SYNC208
# expect.ranks: all
# expect.subject: weight
# expect.step: 0
# plain_pytorch: silent
"""Nothing ties the ranks together, so one is many steps ahead of the other all the time."""

import functools
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def train_step(model, opt, x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss.item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
    opt = torch.optim.AdamW(raw.parameters(), lr=3e-3)
    model = DDP(raw)
    step = functools.partial(train_step, raw if FAULT else model, opt)
    gen = torch.Generator().manual_seed(rank)
    time.sleep(2.5 * rank)  # its files come from a slower disk
    losses = []
    for _ in range(50):
        x = torch.randn(20, 10, generator=gen)
        losses.append(step(x, x[:, :3].argmax(1)))
        time.sleep(0.07)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
