"""The same with DDP's forward and the forward of the model inside; two ranks.

ranks: 2
"""

import inspect

import torch
from _report import batches, ddp, finish, report, start
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, mask=None):
        return self.layer(x if mask is None else x * mask)


start()
model = ddp(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = []
for x in batches(count=10):
    batch = {"x": x, "mask": (x > 0).float(), "extra": None}
    known = inspect.getfullargspec(model.module.forward).args
    outer, code = inspect.getfullargspec(model.forward), model.forward.__code__
    names = code.co_varnames[: code.co_argcount]
    optimizer.zero_grad()
    loss = model(**{name: value for name, value in batch.items() if name in known}).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, known=known, outer=outer, code=names)
del model
finish()
