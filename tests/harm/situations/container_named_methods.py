"""Batches of named tuples and objects whose classes count what is asked of them, and of many Python objects.

parts: all
"""
from collections import namedtuple

import torch
from _report import report, start
from torch import nn

start()
asked = {}


def count(name):
    asked[name] = asked.get(name, 0) + 1


class Meta(type):
    def __getattr__(cls, name):
        count(f"class.{name}")
        raise AttributeError(name)


class Sample(namedtuple("Sample", "x y")):
    def __iter__(self):
        count("iter")
        return super().__iter__()

    @classmethod
    def _make(cls, values):
        count("make")
        return super()._make(values)


class Opaque(metaclass=Meta):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 2)

    def forward(self, sample, more, words):
        return self.part(sample.x), len(words)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
words = {f"word {i}": [i, str(i)] for i in range(5000)}
losses = []
for step in range(12):
    sample = Sample(torch.randn(3, 4), torch.randn(3, 2))
    out, _ = model(sample, [Opaque(), sample, list(range(6000))], words)
    loss = (out - sample.y).square().mean()
    if step == 7:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    if step != 7:
        optimizer.step()
    losses.append(loss)
report([model], [optimizer], losses, asked=sorted(asked.items()))
