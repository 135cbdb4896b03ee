"""Proxies that make up their class and attributes are in the loop and in the model, and NaN comes; two ranks.

ranks: 2
"""

import collections

import torch
from _report import batches, ddp, report, start
from torch import nn

calls = collections.Counter()


class Lazy:
    @property
    def __class__(self):
        calls["class"] += 1
        return dict

    def __getattr__(self, name):
        calls[f"attribute {name}"] += 1
        raise AttributeError(name)

    def __iter__(self):
        calls["iteration"] += 1
        return iter(())

    def __len__(self):
        calls["length"] += 1
        return 0

    def __bool__(self):
        calls["truth"] += 1
        return False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.lazy = nn.Linear(16, 4), Lazy()

    def forward(self, batch, more=None):
        return self.linear(batch["x"])


def loop(model, optimizer):
    lazy, held, losses = Lazy(), [], []
    for number, x in enumerate(batches(40)):
        if number == 20 and torch.distributed.get_rank() == 1:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model({"x": x}, more=None).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0)
        optimizer.step()
        held.append((loss, lazy))
        losses.append(loss.detach())
    return losses


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = loop(model, optimizer)
report([model], [optimizer], losses, calls=sorted(calls.items()))
