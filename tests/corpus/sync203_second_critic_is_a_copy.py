# title: The second of two critics is a copy of the first and was not wrapped
# source: constructed
# nproc: 2
# expect.codes: SYNC203, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""It begins equal to the wrapped one, and then every rank trains it alone."""
import copy
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
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(41)
critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
twin = copy.deepcopy(critic)
ddp = DistributedDataParallel(critic)
if not FAULT:
    twin = DistributedDataParallel(twin)
opt, opt_of_twin = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (ddp, twin))
gen = torch.Generator().manual_seed(410 + rank)
track = []
for step in range(60):
    x = torch.randn(16, 8, generator=gen)
    y = x.sum(1, keepdim=True).sin()
    opt_of_twin.zero_grad()
    nn.functional.mse_loss(twin(x), y).backward()
    opt_of_twin.step()
    opt.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
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
