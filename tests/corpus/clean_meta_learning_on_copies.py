# title: The inner loop of first-order MAML trains copies of the wrapped model on each rank's own tasks
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The gradients of the adapted copies are averaged over the ranks by hand, and the outer optimizer steps with them."""
import copy
import math
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(41)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)))
outer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(410 + rank)


def task():
    height, phase = 0.1 + 4.9 * torch.rand(1, generator=gen), math.pi * torch.rand(1, generator=gen)

    def sample(count):
        x = 10 * torch.rand(count, 1, generator=gen) - 5
        return x, height * torch.sin(x + phase)

    return sample


track = []
for step in range(60):
    outer.zero_grad()
    total = 0.0
    for _ in range(3):
        sample = task()
        fast = copy.deepcopy(ddp.module)
        inner = torch.optim.SGD(fast.parameters(), lr=0.01)
        for _ in range(3):
            x, y = sample(10)
            inner.zero_grad()
            nn.functional.mse_loss(fast(x), y).backward()
            inner.step()
        x, y = sample(10)
        loss = nn.functional.mse_loss(fast(x), y)
        for p, grad in zip(ddp.parameters(), torch.autograd.grad(loss, list(fast.parameters()))):
            p.grad = grad / 3 if p.grad is None else p.grad + grad / 3
        total += loss.item() / 3
    for p in ddp.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    outer.step()
    track.append(total)
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
