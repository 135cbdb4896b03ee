# title: A hand-written data parallel loop averages the gradients of the weights and forgets those of the biases
# source: constructed
# nproc: 2
# expect.codes: RANK101, SYNC208
# expect.ranks: any
# expect.subject: bias
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Data parallel training by hand: no DDP, no optimizer, an all-reduce for each gradient and a plain update."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


def average(parameters, world):
    for p in parameters:
        if FAULT and p.dim() == 1:
            continue
        dist.all_reduce(p.grad)
        p.grad /= world


torch.set_num_threads(1)
dist.init_process_group("gloo")
me, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
net = nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12, 4))
g = torch.Generator().manual_seed(70 + me)
curve = []
for step in range(40):
    kind = torch.randint(0, 4, (32,), generator=g)
    wave = torch.sin(torch.arange(16.0) * (kind[:, None] + 1) / 3)
    x = wave[:, None] + 0.2 * torch.randn(32, 3, 16, generator=g)
    loss = nn.functional.cross_entropy(net(x), kind)
    loss.backward()
    average(net.parameters(), world)
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.05 * p.grad
            p.grad = None
    curve.append(loss.item())

crc = 0
for p in net.parameters():
    crc = zlib.crc32(p.detach().numpy().tobytes(), crc)
print(f"RESULT rank={me} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
