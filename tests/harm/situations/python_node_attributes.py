"""A loss whose autograd function keeps attributes on its node that have the names of a node's own; two ranks.

ranks: 2
"""

import torch
from _report import ddp, finish, report, start
from torch import nn

calls = []


class Said(str):
    def __call__(self):
        calls.append(str(self))
        return self


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name, ctx.variable, ctx.shape = Said("squares"), x.shape, x.shape
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()


start()
model = ddp(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(40):
    x = torch.full((4, 8), step / 40)
    loss = Squares.apply(model(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, calls=calls)
finish()
