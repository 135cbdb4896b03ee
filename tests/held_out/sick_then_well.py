# title: Two data sets, one for each class, are put behind each other and read in order
# source: constructed
# nproc: 2
# expect.codes: DATA904
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Blood values of patients and of others."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT") == "1"


class Group(Dataset):
    def __init__(self, label, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.values = torch.randn(n, 9, generator=gen)
        self.values[:, 2:5] += 0.8 if label else -0.8
        self.label = label

    def __getitem__(self, i):
        return self.values[i], self.label

    def __len__(self):
        return len(self.values)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
everyone = ConcatDataset([Group(1, 512, 0), Group(0, 512, 1)])
sampler = DistributedSampler(everyone, shuffle=not FAULT)
loader = DataLoader(everyone, 16, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for values, label in loader:
        loss = nn.functional.cross_entropy(model(values), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
