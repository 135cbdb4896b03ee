"""Dict and list batches that count how often they are iterated."""

import torch
from _report import batches, ddp, report, start
from torch import nn

calls = {"dict": 0, "list": 0}


class Counted(dict):
    def _count(name):
        def method(self, *args):
            calls["dict"] += 1
            return getattr(dict, name)(self, *args)

        return method

    __iter__, items, values, keys, __len__ = map(_count, ["__iter__", "items", "values", "keys", "__len__"])


class Row(list):
    def __iter__(self):
        calls["list"] += 1
        return super().__iter__()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, batch, rows):
        return {"out": self.linear(dict.__getitem__(batch, "x")) + list.__getitem__(rows, 0)[:, :4]}


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches():
    loss = model(Counted(x=x, name="a"), Row([x, x]))["out"].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses, calls=calls)
