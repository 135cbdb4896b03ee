"""A function mode around evaluations; attention keeps its fast path.

parts: all
"""

import contextlib

import torch
from _report import batches, ddp, digest, finish, report, start
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Counting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        with Counting() if self.inside else contextlib.nullcontext():
            x = F.dropout(self.layer(x[None]), 0.2)
        return self.head(x)[0]

    inside = False


def evaluate():
    model.eval()
    with torch.no_grad():
        values = []
        for x in batches(3, seed=7):
            out = model(x)
            values += [out, criterion(out, x[:, :4]), torch._C._len_torch_function_stack()]
    model.train()
    return values


start()
seen = []
inner, criterion = Net(), nn.MSELoss()
model = ddp(inner)
optimizer = torch.optim.SGD(inner.parameters(), 1e-2)
losses, found = [], []
for epoch in range(5):
    for x in batches(5):
        optimizer.zero_grad()
        loss = criterion(model(x), x[:, :4])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    inner.inside = epoch == 2
    if epoch in {1, 3}:
        with Counting():
            found.append(digest(evaluate()))
    else:
        found.append(digest(evaluate()))
    inner.inside = False
report([inner], [optimizer], losses, found=found, seen=digest(seen), count=len(seen))
del model
finish()
