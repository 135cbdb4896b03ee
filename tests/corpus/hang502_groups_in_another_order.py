# title: Two process groups are used in the order of a set, which differs between ranks
# source: constructed
# nproc: 2
# expect.codes: HANG502
# expect.ranks: any
# expect.subject: any
# expect.step: any
# expect.op: all_reduce
# expect.location: hang502_groups_in_another_order.py:40
# plain_pytorch: error
"""A tower with statistics of two kinds, each averaged in a group of its own after the step."""
import datetime
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=14))
rank = dist.get_rank()
groups = {name: dist.new_group([0, 1], timeout=datetime.timedelta(seconds=14)) for name in ("means", "spreads")}
torch.manual_seed(8)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 20), nn.ELU(), nn.Linear(20, 6)))
opt = torch.optim.RMSprop(ddp.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(80 + rank)
means, spreads = torch.zeros(6), torch.ones(6)


def average(values):
    names = sorted(values)
    if FAULT and rank == 1 and step == 25:
        names = names[::-1]  # a set may give them in any order
    for name in names:
        dist.all_reduce(values[name], group=groups[name])
        values[name] /= 2


track = []
for step in range(45):
    x = torch.randn(24, 6, generator=gen) * 2 + 1
    loss = (ddp((x - means) / spreads) - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    means.lerp_(x.mean(0), 0.1)
    spreads.lerp_(x.std(0), 0.1)
    average({"means": means, "spreads": spreads})
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
