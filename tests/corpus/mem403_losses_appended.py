# title: The losses of an epoch are kept as tensors
# source: https://docs.pytorch.org/docs/stable/notes/faq.html
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: losses
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Regression of a damped oscillation; the epoch's mean loss is taken from a list at the end."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(5)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)))
opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(500 + rank)


def epoch(steps):
    losses = []
    for _ in range(steps):
        x = torch.rand(64, 3, generator=gen)
        y = torch.exp(-x[:, :1]) * torch.cos(6 * x[:, 1:2]) + 0.1 * x[:, 2:]
        loss = nn.functional.mse_loss(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss if FAULT else loss.item())
    return float(losses[0]), float(sum(losses[-5:]) / 5)


first, final = epoch(60)
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
