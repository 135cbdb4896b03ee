"""Gives a kernel an index that is too large: device_assert.py embedding|labels [DEVICE]; with RANK, on rank 1 of DDP."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn, distributed as dist

kind = sys.argv[1]
device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
rank, world = 0, 1
if "RANK" in os.environ:
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, idx):
        h = self.embed(idx)  # EMBEDDING
        return self.head(h.mean(1))


torch.manual_seed(0)
model = Net().to(device)
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    idx, labels = torch.randint(0, 1000, (8, 16)), torch.randint(0, 10, (8,))
    if step == 30 and rank == world - 1:
        if kind == "embedding":
            idx[3, 5] = 1000
        else:
            labels[3] = 10
    idx, labels = idx.to(device), labels.to(device)
    with torch.autocast(device, torch.bfloat16):
        out = model(idx)
        loss = F.cross_entropy(out.float(), labels)  # LABELS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("DONE")
