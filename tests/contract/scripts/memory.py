"""Two ranks, of which one asks for more memory than it may have."""

import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters())
now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
for step in range(8):
    rows = 1 << 25 if step == 5 and dist.get_rank() == 1 else 16
    optimizer.zero_grad()
    model(torch.ones(1, 64).expand(rows, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
