"""Optimizers without super().__init__, whose step returns a tuple, or that are no Optimizer."""

import torch
from _report import batches, report, start
from torch import nn


class Bare(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state = {}

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad


class Returns(torch.optim.SGD):
    def step(self, closure=None, *, extra):
        super().step(closure)
        return extra, self


class Duck:
    def __init__(self, params):
        self.params = list(params)

    def step(self):
        with torch.no_grad():
            torch._foreach_add_(self.params, [p.grad for p in self.params], alpha=-0.1)


start()
model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
optimizers = [Bare(model.parameters()), Returns(model.parameters(), 0.1), Duck(model.parameters())]
losses = []
for x in batches(9):
    optimizer = optimizers[len(losses) % 3]
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if isinstance(optimizer, Returns):
        assert optimizer.step(extra=3) == (3, optimizer)
    else:
        assert optimizer.step() is None
    losses.append(loss.detach())
report([model], [optimizers[1]], losses)
