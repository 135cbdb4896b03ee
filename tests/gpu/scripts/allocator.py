"""Fills memory in an unhealthy way: allocator.py leak|fragments|imbalance [DEVICE]."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

how = sys.argv[1]
device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
if how == "fragments":
    torch.cuda.set_per_process_memory_fraction((1700 << 20) / torch.cuda.get_device_properties(0).total_memory)
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Linear(64, 64).to(device)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0] if device == "cuda" else None)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
held = []
MIB = 1 << 18  # floats
for step in range(80):
    optimizer.zero_grad()
    model(torch.ones(8, 64, device=device)).sum().backward()
    optimizer.step()
    if how == "leak":
        held.append(torch.ones(4 * MIB, device=device))
    elif how == "fragments" and step == 2:
        spare = torch.ones(300 * MIB, device=device)
        del spare  # cached: the last piece finds room only once this was given back
        pieces = [torch.ones(2 * MIB, device=device) for _ in range(400)]  # ten in each segment of the allocator
        held = pieces[::10]  # each keeps its segment, of which nine tenths are free: too small for what comes next
        del pieces
        held.append(torch.ones(700 * MIB, device=device))
    elif how == "imbalance" and rank == 1 and step == 2:
        held.append(torch.ones(600 * MIB, device=device))
if dist.is_initialized():
    del model
    dist.destroy_process_group()
