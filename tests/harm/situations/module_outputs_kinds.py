"""Forwards return dataclasses, generators, mappings that count, closures, None, nested objects."""

import collections
import dataclasses
import typing

import torch
from _report import batches, report, start
from torch import nn


class Pair(typing.NamedTuple):
    loss: torch.Tensor
    out: torch.Tensor


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    more: dict


class Slots:
    __slots__ = ("loss", "__weakref__")


class Counting(collections.UserDict):
    asked = 0

    def __getitem__(self, key):
        Counting.asked += 1
        return super().__getitem__(key)

    def __iter__(self):
        Counting.asked += 1
        return super().__iter__()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, kind):
        out = self.layer(x)
        loss = out.square().mean()
        if kind == "pair":
            return Pair(loss, out)
        if kind == "result":
            return Result(loss, {"out": [out, (out,)], "none": None})
        if kind == "slots":
            result = Slots()
            result.loss = loss
            return result
        if kind == "counting":
            return Counting(loss=loss, out=out)
        if kind == "generator":
            return (part for part in (loss, out))
        if kind == "closure":
            return lambda: loss
        if kind == "none":
            self.kept = loss
            return None
        return iter([loss])


start()
model = Net()
wrapper = nn.ModuleDict({"net": model})
optimizer = torch.optim.SGD(wrapper.parameters(), 0.01)
kinds = ["pair", "result", "slots", "counting", "generator", "closure", "none", "iterator"]
losses = []
for x in batches(6):
    for kind in kinds:
        optimizer.zero_grad()
        got = model(x, kind)
        if kind == "counting":
            loss = got["loss"]
        elif kind in {"generator", "iterator"}:
            loss = next(got)
            rest = len(list(got))
        elif kind == "closure":
            loss = got()
        elif kind == "none":
            loss = model.kept
        else:
            loss = got.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
report([model], [optimizer], losses, asked=Counting.asked, rest=rest)
