"""`torch.autograd.backward` of iterators, of a gradient edge, and forwards whose keyword arguments have common names.

parts: all
"""
import torch
from _report import report, start
from torch import nn
from torch.autograd.graph import get_gradient_edge

start()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 2)

    def forward(self, x, **more):
        return self.part(x) + sum(value.mean() for value in more.values())


models = [Named() for _ in range(3)]
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
names = ("module", "ddp", "output", "error", "part", "args", "kwargs", "tensors", "call", "probe")
losses = []
for step in range(20):
    more = {names[step % len(names)]: torch.ones(3)}
    own = [model(torch.randn(3, 4), **more).square().sum() for model in models]
    optimizer.zero_grad()
    if step % 4 == 0:
        torch.autograd.backward(loss for loss in own)
    elif step % 4 == 1:
        torch.autograd.backward(map(lambda loss: loss * 1.0, own))
    elif step % 4 == 2:
        torch.autograd.backward([get_gradient_edge(loss) for loss in own])
    else:
        torch.autograd.backward(tuple(own))
    optimizer.step()
    losses.append(sum(own))
report(models, [optimizer], losses)
