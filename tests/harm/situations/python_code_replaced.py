"""`__code__` is exchanged: of a forward, a loss, a torch function."""

import types

import torch
import torch.nn.functional as F
from _report import batches, report, start
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x)


def other(self, x):
    return self.layer(x) * 2


def loss_of(out):
    return F.mse_loss(out, torch.zeros_like(out))


def other_loss(out):
    return F.mse_loss(out, torch.ones_like(out)) + out.abs().mean()


def run(count):
    for x in batches(count):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())


start()
model, losses = Net(), []
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run(10)
Net.forward.__code__, loss_of.__code__ = other.__code__, other_loss.__code__
run(10)
before = F.mse_loss.__code__
calls = []


def counted(input, target, size_average=None, reduce=None, reduction="mean", weight=None):
    return (input - target).abs().mean()


F.mse_loss.__code__ = counted.__code__
run(10)
F.mse_loss.__code__ = before
run(10)
again = types.FunctionType(F.mse_loss.__code__, F.mse_loss.__globals__, "again", F.mse_loss.__defaults__)
losses.append(again(torch.ones(2), torch.zeros(2)))
step = torch.optim.SGD.step
torch.optim.SGD.step = types.FunctionType(step.__code__, step.__globals__, "step", step.__defaults__, step.__closure__)
run(10)
torch.optim.SGD.step = step
run(10)
report([model], [optimizer], losses)
