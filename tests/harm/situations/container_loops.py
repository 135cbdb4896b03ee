"""A list that contains itself, a dict of 10,000 entries, deep nesting."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, batch):
        return self.linear(batch[0])


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches():
    itself = [x]
    itself.append(itself)
    deep = [x]
    for _ in range(2000):
        deep = [x, deep]
    for batch in (itself, [x, {i: i for i in range(10_000)}], deep):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
report([model], [optimizer], losses)
