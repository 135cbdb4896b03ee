"""Exceptions in a forward and in a backward hook, caught; then one that is not."""

import torch
from _report import batches, report, start
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.limit = 10

    def forward(self, x):
        out = self.linear(x)
        if self.limit <= 0:
            raise RuntimeError("CUDA out of memory, or so")
        self.limit -= 1
        return out


def refuse(gradient):
    raise ArithmeticError("in backward")


start()
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses, caught = [], []
for number, x in enumerate(batches(14)):
    try:
        out = model(x)
        if number == 3:
            out.register_hook(refuse)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    except (RuntimeError, ArithmeticError) as error:
        caught.append(f"{type(error).__name__}: {error}")
        model.limit = 3 if len(caught) < 3 else 0
report([model], [optimizer], losses, caught=caught)
model(x)
