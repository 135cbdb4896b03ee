"""A forward counts, draws from Python's random and prints; a NaN batch.

ranks: 2
"""

import random

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        self.kept.append(random.random())
        print("forward", self.calls)
        return self.drop(self.norm(self.linear(x))) * random.random()


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = [x / 0 * 0 if number == 4 else x for number, x in enumerate(batches(7))]
losses = train(model, optimizer, data)
report([model], [optimizer], losses, calls=model.module.calls, kept=model.module.kept)
