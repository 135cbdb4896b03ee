"""A model uses all but ten frames of the recursion limit."""

import sys

import torch
from _report import batches, ddp, report, start
from torch import nn


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, depth=0):
        return self.linear(x) if depth == 400 else self.forward(x, depth + 1)


def fits(limit):
    sys.setrecursionlimit(limit)
    try:
        model(torch.ones(1, 16))
    except RecursionError:
        return False
    return True


start()
model = ddp(Deep())
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = []
least = next(limit for limit in range(400, 700) if fits(limit))
sys.setrecursionlimit(least + 10)
for x in batches():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
sys.setrecursionlimit(1000)
report([model], [optimizer], losses)
