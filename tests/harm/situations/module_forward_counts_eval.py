"""A forward counts its calls; evaluation without no_grad, in train mode."""

import torch
from _report import batches, digest, report, start, train
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 4), nn.Dropout(0.2)
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        self.kept.append(x)
        print("forward", self.calls, self.training)
        return self.drop(self.linear(x))


start()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for epoch in range(4):
    losses += train(model, optimizer, batches(4))
    with torch.no_grad():
        for x in batches(2, seed=9):
            losses.append(model(x).square().mean())
            losses.append(model(x).square().mean())
report([model], [optimizer], losses, calls=model.calls, kept=digest(model.kept))
