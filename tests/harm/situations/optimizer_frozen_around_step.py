"""requires_grad of a layer is off while the optimizer steps.

ranks: 2
parts: all
"""

import torch
from _report import batches, ddp, finish, report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
wrapped = ddp(model)
optimizer = torch.optim.Adam(wrapped.parameters(), 1e-3)
losses = []
for x in batches(12):
    optimizer.zero_grad()
    loss = wrapped(x).square().mean()
    losses.append(loss.detach())
    loss.backward()
    model[0].requires_grad_(False)
    optimizer.step()
    model[0].requires_grad_(True)
report([model], [optimizer], losses)
del wrapped
finish()
