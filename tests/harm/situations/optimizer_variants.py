"""Fused, foreach, differentiable, capturable, sparse optimizers, in turn, twice, or empty."""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizers = [
    torch.optim.AdamW(model.parameters(), fused=True),
    torch.optim.SGD(model.parameters(), 0.01, foreach=True, momentum=0.9, nesterov=True),
    torch.optim.RMSprop(model.parameters(), 1e-3, maximize=True),
    torch.optim.Adagrad(model.parameters(), 1e-3),
    torch.optim.Muon([model.module[0].weight], 1e-3),
]
losses = []
for x in batches(5):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=len(losses) % 2 == 0)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.step()
        losses.append(loss.detach())
optimizers[1].zero_grad()
optimizers[1].step()
report([model], optimizers, losses)
