"""Depth left below the recursion limit in forwards, hooks and steps."""

import torch
from _report import batches, report, start
from torch import nn

seen = {}


def depth():
    """Return how many frames are left where it is called."""

    def deeper():
        nonlocal count
        count += 1
        deeper()

    count = 0
    try:
        deeper()
    except RecursionError:
        pass
    return count


def left(name):
    seen.setdefault(name, set()).add(depth() - of_script)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        left("function")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        left("backward of function")
        return gradient * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        left("forward")
        return Double.apply(self.layer(x))


class Loss(nn.Module):
    def forward(self, x):
        left("loss")
        return x.square().mean()


class Own(torch.optim.SGD):
    def step(self, closure=None):
        left("step")
        return super().step(closure)


start()
of_script = depth()
model, loss_of = nn.Sequential(Net(), nn.ReLU()), Loss()
optimizer = Own(model.parameters(), 0.01)
model.register_forward_hook(lambda *args: left("hook"))
model[0].layer.register_forward_pre_hook(lambda *args: left("pre-hook"))
model.register_full_backward_hook(lambda *args: left("backward hook"))
optimizer.register_step_post_hook(lambda *args: left("hook of the step"))
losses = []
for x in batches(40):
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, left={name: sorted(found) for name, found in seen.items()})
