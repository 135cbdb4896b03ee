"""Random numbers of torch, Python and numpy, also from the script's generators."""

import random
import secrets

import numpy as np
import torch
from _report import batches, ddp, report, start
from torch import nn

start()
own = torch.Generator().manual_seed(3)
other = np.random.default_rng(4)
third = random.Random(5)
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses, drawn = [], []
for x in batches(12):
    optimizer.zero_grad()
    loss = model(x + torch.randn(16, generator=own) * 0.1 + float(other.normal())).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    drawn.append((random.random(), np.random.rand(), third.random(), torch.rand(1).item(), torch.initial_seed()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn.append(torch.rand(1).item())
report([model], [optimizer], losses, drawn=drawn, own=own.get_state().sum(), other=other.random())
