"""A model counts how often it is listed, copied or saved."""

import collections

import torch
from _report import ddp, report, start, train
from torch import nn

calls = collections.Counter()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def named_parameters(self, *args, **kwargs):
        calls["named_parameters"] += 1
        for name, p in super().named_parameters(*args, **kwargs):
            yield name, p

    def state_dict(self, *args, **kwargs):
        calls["state_dict"] += 1
        return super().state_dict(*args, **kwargs)

    def __deepcopy__(self, memo):
        raise RuntimeError("there is one of me")

    def __getattr__(self, name):
        if name.startswith("secret"):
            raise RuntimeError("do not ask")
        return super().__getattr__(name)

    def __repr__(self):
        calls["repr"] += 1
        return "Counting()"

    def train(self, mode=True):
        calls["train"] += 1
        return super().train(mode)

    def forward(self, x):
        return self.linear(x)


start()
model = ddp(Counting())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
calls.clear()
losses = train(model, optimizer)
seen = sorted(calls.items())
report([model], [optimizer], losses, seen=seen)
