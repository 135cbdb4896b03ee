"""A small training whose rank 1 fails in the first attempt of an elastic launcher, and in no other."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(12):
    if step == 5 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise KeyError("no such sample")
    optimizer.zero_grad()
    model(torch.full((4, 8), float(rank + step))).square().mean().backward()
    optimizer.step()
    time.sleep(0.2)
del model, optimizer  # DDP's threads end before the group that they use
dist.destroy_process_group()
print("done", flush=True)
