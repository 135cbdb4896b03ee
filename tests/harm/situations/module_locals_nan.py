"""Functions write into their locals(); a NaN batch.

ranks: 2
"""

import torch
from _report import batches, ddp, report, start
from torch import nn

notes = []


class Scale(nn.Module):
    def forward(self, x, factor):
        return x * factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.last = nn.Linear(16, 8), Scale(), nn.Linear(8, 4)
        self.notes = []

    def forward(self, x):
        locals()["note"] = len(self.notes)
        out = self.last(self.scale(self.linear(x), x[0, 0] / x[0, 0].detach()))
        self.notes.append(locals().get("note"))
        return out


def step(model, optimizer, x):
    locals()["note"] = "step"
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    notes.append(locals().get("note"))
    optimizer.step()
    return loss.detach()


def loop(model, optimizer):
    locals()["note"] = "loop"
    losses = []
    for number, x in enumerate(batches(7)):
        if number == 4:
            x[0, 0] = 0
        losses.append(step(model, optimizer, x))
        notes.append(locals().get("note"))
    return losses


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = loop(model, optimizer)
report([model], [optimizer], losses, notes=notes, own=model.module.notes)
