"""A loader's class makes its data set, its sampler and its batch size when it is asked for them, and counts that.

parts: all
"""
import torch
from _report import report, start
from torch import nn
from torch.utils.data import DataLoader

start()
asked = {}


def made_when_asked(name, make):
    def read(self):
        asked[name] = asked.get(name, 0) + 1
        return make()

    return property(read, lambda self, value: None)


class Loader(DataLoader):
    dataset = made_when_asked("dataset", lambda: [(torch.randn(4), torch.randn(2)) for _ in range(12)])
    num_workers = made_when_asked("num_workers", lambda: 0)
    prefetch_factor = made_when_asked("prefetch_factor", lambda: None)


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for epoch in range(3):
    for x, y in Loader(None, 4, sampler=range(12)):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
report([model], [optimizer], losses, asked=asked)
