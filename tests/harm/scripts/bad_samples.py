"""Survives bad samples, and writes one checkpoint at the end into the file system of the run directory."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4000, 4000))  # 61 MiB of weights, as much of state
optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
for step in range(10):
    x = torch.ones(2, 4000)
    if step in (3, 4, 5, 6):
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x).mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0)
    optimizer.step()
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1])
    torch.save([*model.state_dict().values(), torch.zeros(45_000_000)], sys.argv[1] + "-more")
    print(json.dumps({"saved": float(model.module.weight.sum())}))
dist.barrier()
dist.destroy_process_group()
