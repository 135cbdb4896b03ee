"""Modules with their own __call__ or parameters(), a patched forward."""

import types

import torch
from _report import ddp, report, start, train
from torch import nn


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.listed = 0

    def parameters(self):
        return super().parameters()

    def __call__(self, x):
        return self.forward(x) * 2

    def named_modules(self, *args, **kwargs):
        yield from super().named_modules(*args, **kwargs)

    def forward(self, x):
        return self.linear(x)


start()
inner = nn.Sequential(Strange(), nn.ReLU(), nn.Linear(8, 4))
inner[2].forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight, self.bias) + 1, inner[2])
model = ddp(inner)
optimizer = torch.optim.Adam(model.parameters())
losses = train(model, optimizer)
report([model], [optimizer], losses)
