"""Meta-learning: short-lived optimizers train copies of the model.

ranks: 2
"""

import copy

import torch
from _report import batches, ddp, finish, report, start
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)))
outer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for x in batches(9):
    outer.zero_grad()
    fast = copy.deepcopy(model.module)
    inner = torch.optim.SGD(fast.parameters(), 0.1, momentum=0.9)
    for part in x.split(2):
        inner.zero_grad()
        fast(part).square().mean().backward()
        inner.step()
    loss = fast(x).square().mean()
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(fast.parameters()))):
        p.grad = grad
        torch.distributed.all_reduce(p.grad)
    outer.step()
    losses.append(loss.detach())
report([model, fast], [outer, inner], losses)
del model
finish()
