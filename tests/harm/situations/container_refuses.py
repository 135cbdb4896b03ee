"""A dict whose iteration raises, and an unused parameter; two ranks.

ranks: 2
"""

import torch
from _report import ddp, report, start, train
from torch import nn


class Sealed(dict):
    def _no(self, *args):
        raise RuntimeError("nobody iterates over this")

    __iter__ = items = values = keys = _no


class Pass(nn.Module):
    def forward(self, d):
        return d


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inner, self.unused = nn.Linear(16, 4), Pass(), nn.Linear(3, 3)

    def forward(self, x):
        sealed = Sealed()
        dict.__setitem__(sealed, "x", x)
        return self.linear(dict.__getitem__(self.inner(sealed), "x"))


start()
model = ddp(Model(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
report([model], [optimizer], losses)
