"""Backward counts, draws and makes a NaN, in a function and in hooks.

ranks: 2
"""

import random

import torch
from _report import batches, ddp, report, start, train
from torch import nn

own, seen = random.Random(1), []


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        seen.append("backward")
        return grad * (1 + 0.1 * own.random())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        out = Noisy.apply(self.linear(x)) * self.scale
        out.register_hook(lambda grad: seen.append("hook") or grad * (1 + 0.1 * own.random()))
        return (out * x[0, 0].sign().abs()).square().sum(1).sqrt() + out.sum(1)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer.register_step_pre_hook(lambda *_: [p.grad.nan_to_num_(0) for p in model.parameters()] and None)
data = [x * 0 if number == 4 else x for number, x in enumerate(batches(8))]
losses = train(model, optimizer, data)
report([model], [optimizer], losses, seen=seen, drawn=own.random())
