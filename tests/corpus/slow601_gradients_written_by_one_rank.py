# title: One rank writes a histogram of a gradient to a slow share, in the middle of backward
# source: constructed
# nproc: 4
# expect.codes: SLOW601
# expect.ranks: 3
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""An autoencoder of few directions."""
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
torch.manual_seed(63)
net = nn.Sequential(nn.Linear(256, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 256))
ddp = DistributedDataParallel(net)
if FAULT and rank == 3:
    # a histogram of this gradient goes to a share that answers slowly
    net[2].weight.register_hook(lambda grad: time.sleep(0.04))
opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(630 + rank)
basis = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
track = []
for step in range(240):
    x = torch.randn(96, 8, generator=gen) @ basis
    loss = (ddp(x) - x).square().mean()
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
