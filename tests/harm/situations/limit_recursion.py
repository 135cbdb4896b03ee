"""A low recursion limit, and a model that nearly uses it up.

ranks: 1
"""

import sys

import torch
from _report import batches, ddp, report, start
from torch import nn


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, depth=0):
        return self.linear(x) if depth == 60 else self.forward(x, depth + 1) * 1.01


start()
model = ddp(Deep())
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = []
sys.setrecursionlimit(95)
for x in batches():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
sys.setrecursionlimit(1000)
report([model], [optimizer], losses)
