"""Saved tensor hooks, fork_rng, seeds and generators in forwards."""

import torch
from _report import batches, report, start
from torch import nn

packed = unpacked = calls = 0


def pack(tensor):
    global packed
    packed += 1
    return tensor


def unpack(tensor):
    global unpacked
    unpacked += 1
    return tensor


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        global calls
        calls += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        global calls
        calls += 100
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            noise = torch.randn(4)
        more = torch.randn(4, generator=self.generator)
        return Square.apply(self.layer(x) + noise * 0.1 + more * 0.1 + torch.rand(4))


start()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
    for x in batches(40):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
counts = packed, unpacked, calls, torch.initial_seed(), model.generator.get_state().sum().item()
report([model], [optimizer], losses, counts=counts)
