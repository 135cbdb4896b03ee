# title: The larger device gets twice the batch, on purpose, and the loss is weighted by it
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Ranks of unequal strength, simulated on equal ones."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(68)
net = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(680 + rank)
truth = torch.randn(200, 5, generator=torch.Generator().manual_seed(6))
size = 128 if rank == 0 else 64
share = size * dist.get_world_size() / (64 * dist.get_world_size() + 64)
track = []
for step in range(260):
    x = torch.randn(size, 200, generator=gen)
    loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1)) * share
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
