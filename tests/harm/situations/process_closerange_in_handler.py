"""All descriptors from 3 on are closed while an exception is handled."""

import os
import sys

import torch
from _report import batches, report, start, train
from torch import nn


class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x):
        if x[0, 0] > 50:
            raise ValueError("too large")
        return self.inner(x)


start()
model = Refuses()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
files, found = [], []
for k in range(3):
    try:
        train(model, optimizer, [torch.full((2, 16), 99.0)])
    except ValueError:
        os.closerange(3, 200)
        files += [open(f"mine{k}-{i}.log", "w") for i in range(8)]
        losses += train(model, optimizer, batches(5))
        found.append(sys.exc_info()[0].__name__)
try:
    try:
        raise KeyError("first")
    finally:
        os.closerange(3, 200)
        losses += train(model, optimizer, batches(40))
except KeyError as error:
    found.append(repr(error.__context__))
report([model], [optimizer], losses, found=found)
try:
    model(torch.full((2, 16), 99.0))
finally:
    os.closerange(3, 200)
