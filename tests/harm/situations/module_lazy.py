"""Lazy modules: one filled by its first forward, one never."""

import torch
from _report import batches, report, start
from torch import nn

start()
never = nn.LazyLinear(3)
model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for x in batches():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses, never=repr(never.weight))
