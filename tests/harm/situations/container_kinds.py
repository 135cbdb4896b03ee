"""A batch as dataclass, slots, named tuple, UserDict, OrderedDict, computed mapping."""

import collections
import dataclasses
from typing import NamedTuple

import torch
from _report import batches, ddp, report, start
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    x: torch.Tensor
    note: str = "a"


class Named(NamedTuple):
    x: torch.Tensor
    y: int


class Encoding(collections.UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Computed(collections.abc.Mapping):
    def __init__(self, x):
        self.x, self.calls = x, 0

    def __getitem__(self, key):
        self.calls += 1
        return self.x * self.calls

    def __iter__(self):
        return iter("x")

    def __len__(self):
        return 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, collections.abc.Mapping) else batch.x
        return Named(self.linear(x), 1)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches():
    kinds = [Record(x), Named(x, 2), Encoding(x=x), collections.OrderedDict(x=x), Computed(x)]
    for batch in kinds:
        loss = model(batch).x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
report([model], [optimizer], losses)
