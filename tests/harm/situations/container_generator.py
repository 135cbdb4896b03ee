"""A module called with generators and iterators."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, parts, more, last):
        return sum(self.linear(part) for part in parts) + sum(next(more) for _ in range(2)) + sum(last)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches():
    out = model((part for part in x.chunk(2)), iter([1.0, 2.0, 3.0]), last=map(float, "123"))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses)
