# title: A guard against outliers clears the momentum of the rank that saw one
# source: constructed
# nproc: 4
# expect.codes: RANK103, RANK101
# expect.ranks: 2
# expect.subject: momentum_buffer
# expect.step: 22
# expect.step_slack: 1
# plain_pytorch: silent
"""Robust regression; rank 2 meets a batch with wild targets at step 21 and empties its momentum afterwards."""
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

torch.manual_seed(15)
true_w = torch.randn(14, 1) / 4
net = nn.Sequential(nn.Linear(14, 32), nn.LeakyReLU(), nn.Linear(32, 1))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
huber = nn.SmoothL1Loss()
gen = torch.Generator().manual_seed(60 + rank)


def forget(optimizer):
    for slot in optimizer.state.values():
        if slot.get("momentum_buffer") is not None:
            slot["momentum_buffer"].zero_()


track = []
for i in range(60):
    x = torch.randn(48, 14, generator=gen)
    y = (x @ true_w).sin()
    if i == 21 and rank == 2:
        y = y + 3.0
    loss = huber(ddp(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    outlier = torch.tensor(float(i > 10 and loss.item() > 1.0))
    if not FAULT:
        dist.all_reduce(outlier, op=dist.ReduceOp.MAX)
    if outlier.item():
        forget(opt)
    track.append(loss.item())

crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={track[0]:.4f} final={sum(track[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
