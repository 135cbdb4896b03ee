"""A dispatch mode and a function mode that count operations."""

import collections

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

seen = collections.Counter()


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen["dispatch"] += 1
        return function(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen["function"] += 1
        return function(*args, **(kwargs or {}))


start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters())
with Count(), CountFunctions():
    losses = train(model, optimizer)
report([model], [optimizer], losses, seen=sorted(seen.items()))
