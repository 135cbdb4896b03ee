"""backward with a gradient, of several losses, twice, with inputs; autograd.grad; double backward."""

import torch
from _report import batches, report, start
from torch import nn


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


start()
model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = []
for x in batches(4):
    for kind in range(6):
        optimizer.zero_grad()
        out = Double.apply(model(x))
        loss = out.square().mean()
        if kind == 0:
            out.backward(torch.ones_like(out))
        elif kind == 1:
            torch.autograd.backward([loss, out.sum()], [None, torch.tensor(0.1)])
        elif kind == 2:
            loss.backward(retain_graph=True)
            loss.backward()
        elif kind == 3:
            loss.backward(inputs=list(model[2].parameters()))
        elif kind == 4:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
        else:
            first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
            sum(g.square().sum() for g in first).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
report([model], [optimizer], losses)
