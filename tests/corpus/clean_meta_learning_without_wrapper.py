# title: Reptile: throw-away copies are trained on each rank's own tasks, and their mean distance steps the model
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""No DDP: the outer optimizer's gradient is averaged over the ranks by hand."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(12)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
outer = torch.optim.SGD(model.parameters(), lr=0.3)
gen = torch.Generator().manual_seed(120 + rank)
track = []
for step in range(40):
    slope = torch.randn(2, 1, generator=gen)
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.05)
    for _ in range(4):
        x = torch.randn(12, 2, generator=gen)
        loss = nn.functional.mse_loss(fast(x), (x @ slope).tanh())
        inner.zero_grad()
        loss.backward()
        inner.step()
    for mine, moved in zip(model.parameters(), fast.parameters()):
        mine.grad = mine.detach() - moved.detach()
        dist.all_reduce(mine.grad)
        mine.grad /= world
    outer.step()
    track.append(loss.item())
    time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={track[0]:.4f} final={track[-1]:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
