# title: Reptile: one copy is trained on each rank's own task and then set back to the model
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The way from the model to the trained copy, averaged over the ranks, is what the outer optimizer steps by."""
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
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1)))
outer = torch.optim.SGD(ddp.parameters(), lr=0.5)
fast = copy.deepcopy(ddp.module)
gen = torch.Generator().manual_seed(410 + rank)


def task():
    height, phase = 0.1 + 4.9 * torch.rand(1, generator=gen), math.pi * torch.rand(1, generator=gen)

    def sample(count):
        x = 10 * torch.rand(count, 1, generator=gen) - 5
        return x, height * torch.sin(x + phase)

    return sample


track = []
for step in range(60):
    sample = task()
    fast.load_state_dict(ddp.module.state_dict())
    inner = torch.optim.Adam(fast.parameters(), lr=1e-2)
    for _ in range(5):
        x, y = sample(10)
        inner.zero_grad()
        loss = nn.functional.mse_loss(fast(x), y)
        loss.backward()
        inner.step()
    outer.zero_grad()
    for p, q in zip(ddp.parameters(), fast.parameters()):
        p.grad = (p - q).detach()
        dist.all_reduce(p.grad)
        p.grad /= world
    outer.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
