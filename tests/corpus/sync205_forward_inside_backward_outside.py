# title: Forward runs inside no_sync and backward outside, so nothing is ever reduced
# source: https://github.com/huggingface/accelerate/pull/1726
# nproc: 2
# expect.codes: SYNC205, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A helper wraps the forward of every micro-batch, meaning to delay the synchronisation to the last backward."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def local_forward(model, x):
    with model.no_sync():
        return model(x)


def update(model, opt, batches):
    opt.zero_grad()
    total = 0.0
    for k, (x, y) in enumerate(batches):
        last = k == len(batches) - 1
        if FAULT:
            loss = nn.functional.huber_loss(local_forward(model, x), y) / len(batches)
            loss.backward()
        elif last:
            loss = nn.functional.huber_loss(model(x), y) / len(batches)
            loss.backward()
        else:
            with model.no_sync():
                loss = nn.functional.huber_loss(model(x), y) / len(batches)
                loss.backward()
        total += loss.item()
    opt.step()
    return total


def pendulum(gen, n=24):
    state = torch.rand(n, 2, generator=gen) * 4 - 2
    theta, omega = state[:, :1], state[:, 1:]
    for _ in range(5):
        omega = omega - 0.1 * theta.sin()
        theta = theta + 0.1 * omega
    return state, torch.cat([theta, omega], 1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(88)
model = DDP(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
losses = [update(model, opt, [pendulum(gen) for _ in range(3)]) for _ in range(50)]
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
