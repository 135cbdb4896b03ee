"""Batches, models, losses and optimizers report when they die.

slow: yes
"""

import gc
import weakref

import torch
from _report import batches, report, start
from torch import nn

start()
gc.disable()
said = []


class Noisy:
    def __init__(s, n):
        s.n = n

    def __del__(s):
        said.append(s.n)


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(16, 4)
        s.noisy = Noisy("model")

    def forward(s, b, note=None):
        return s.l(b["x"])


class F(torch.autograd.Function):
    @staticmethod
    def forward(c, x, n):
        c.n = n
        return x * 1

    @staticmethod
    def backward(c, g):
        return g, None


def go(k, nan=False):
    model = N()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model.register_forward_hook(lambda *a, n=Noisy("hook"): None)
    for i, x in enumerate(batches(8)):
        if nan and i == 4:
            x[0, 0] = float("nan")
        weakref.finalize(x, said.append, f"tensor {i}")
        optimizer.zero_grad()
        y = F.apply(model({"x": x, "o": Noisy(f"item {i}")}, note=Noisy(f"note {i}")), Noisy(f"ctx {i}"))
        z = y.sum()
        weakref.finalize(z, said.append, f"loss {i}")
        z.backward()
        optimizer.step()
        said.append("step")
        del x, y, z
        said.append("deleted")
    said.append("return")


for k in range(3):
    go(k, k == 1)
    said.append("went")
print(said.count("model"))
gc.collect()
print(said.count("model"))
print(said)
mm = N()
oo = torch.optim.SGD(mm.parameters(), 0.01)
report([mm], [oo], [])
