"""Frozen parameters moved by a left gradient, momentum or weight decay; two ranks.

ranks: 2
"""

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
for parameter in inner[2].parameters():
    parameter.requires_grad_(False)
    parameter.grad = torch.ones_like(parameter)
model = ddp(inner)
trains = [*inner[0].parameters(), *inner[3].parameters()]
optimizer = torch.optim.SGD(inner.parameters(), 1e-2, momentum=0.9, weight_decay=0.1)
losses = []
for k, x in enumerate(batches(60)):
    for parameter in trains:
        parameter.grad = None
    loss = model(x).square().mean()
    loss.backward()
    if k == 40:
        inner[2].weight.grad = None
    optimizer.step()
    losses.append(loss)
versions = [(p._version, p.grad is not None and p.grad._version) for p in inner.parameters()]
losses += train(model, optimizer, batches(10))
report([inner], [optimizer], losses, versions=versions)
del model, loss
finish()
