# title: The optimizer of one rank waits for memory that was swapped out
# source: constructed
# nproc: 4
# expect.codes: SLOW601
# expect.ranks: 1
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""Regression of one number."""
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
torch.manual_seed(64)
net = nn.Sequential(nn.Linear(120, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1))
ddp = DistributedDataParallel(net)
opt = torch.optim.Adam(ddp.parameters(), lr=5e-4)
if FAULT and rank == 1:
    # the moments of this rank lie in memory that was swapped out
    opt.register_step_pre_hook(lambda *_: time.sleep(0.04))
gen = torch.Generator().manual_seed(640 + rank)
weights = torch.randn(120, generator=torch.Generator().manual_seed(3))
track = []
for step in range(240):
    x = torch.randn(96, 120, generator=gen)
    loss = nn.functional.huber_loss(ddp(x).squeeze(1), (x @ weights).tanh())
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
