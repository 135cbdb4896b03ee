# title: Everything but the normalisation layers is frozen, the new head as well
# source: constructed
# nproc: 2
# expect.codes: RCP812
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A pretrained net gets a head for other classes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(24, 64)
        self.norm1, self.mid, self.norm2 = nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.stem(x)))
        return self.head(torch.relu(self.norm2(self.mid(x))))


def adapt(net, classes):
    net.head = nn.Linear(64, classes)
    for name, p in net.named_parameters():
        p.requires_grad = "norm" in name or (not FAULT and "head" in name)
    return net


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(12)
model = nn.parallel.DistributedDataParallel(adapt(Pretrained(), 3))
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
rule = torch.randn(24, 3)
gen = torch.Generator().manual_seed(rank)
for step in range(70):
    x = torch.randn(32, 24, generator=gen)
    loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
