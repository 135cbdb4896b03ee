# title: Rank 0 evaluates for a quarter of a minute while the others wait at a barrier
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A small classifier; the validation data are gone through by rank 0 alone, without the wrapper."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10)
net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(100 + rank)
truth = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def batch(size):
    x = torch.randn(size, 5, generator=gen)
    return x, (x @ truth).argmax(1)


def evaluate(seconds):
    right = seen = 0
    until = time.monotonic() + seconds
    net.eval()
    with torch.no_grad():
        while time.monotonic() < until:
            x, y = batch(64)
            right += (net(x).argmax(1) == y).sum().item()
            seen += len(y)
    net.train()
    return right / seen


track = []
for step in range(50):
    x, y = batch(32)
    loss = nn.functional.cross_entropy(ddp(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    if step == 30:
        if rank == 0:
            evaluate(15.0)
        dist.barrier()
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
