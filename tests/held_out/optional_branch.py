# title: A branch of the model is left out when no sample of a batch needs it, and DDP waits for its gradients
# source: constructed
# nproc: 2
# expect.codes: FAIL1001
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Parcels with and without a declared value; a branch for the value. The healthy twin allows for unused parameters."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class Parcels(nn.Module):
    def __init__(self):
        super().__init__()
        self.common = nn.Linear(6, 32)
        self.value = nn.Linear(1, 32)
        self.price = nn.Linear(32, 1)

    def forward(self, batch):
        hidden = self.common(batch["size"])
        declared = batch["declared"]
        if declared.any():
            hidden = hidden.index_add(0, declared.nonzero()[:, 0], self.value(batch["value"][declared]))
        return self.price(torch.relu(hidden))[:, 0]


def parcels(gen, step):
    size = torch.randn(16, 6, generator=gen)
    declared = torch.rand(16, generator=gen) < (0.0 if step in (9, 10, 26) else 0.4)
    value = torch.rand(16, 1, generator=gen)
    price = size[:, 0].abs() + declared * value[:, 0]
    return {"size": size, "declared": declared, "value": value}, price


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = nn.parallel.DistributedDataParallel(Parcels(), find_unused_parameters=not FAULT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
for step in range(45):
    batch, price = parcels(gen, step)
    optimizer.zero_grad()
    loss = (model(batch) - price).abs().mean()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
