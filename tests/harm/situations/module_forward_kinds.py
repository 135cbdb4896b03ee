"""Forwards that are partials, callable objects, static, shared or exchanged."""

import functools

import torch
from _report import batches, report, start, train
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, scale=1.0):
        return self.layer(x) * scale


class Shared(nn.Linear):
    forward = nn.Linear.forward


class Callable:
    def __init__(self, owner=None):
        self.owner = owner

    def __get__(self, instance, owner):
        return Callable(instance)

    def __call__(self, x):
        return self.owner.layer(x) + 1


class Described(Plain):
    forward = Callable()


class Static(Plain):
    last = None

    @staticmethod
    def forward(x):
        return Static.last.layer(x)


class Cached(Plain):
    @functools.cached_property
    def forward(self):
        return lambda x: self.layer(x) - 1


class Wrapped(Plain):
    @torch.enable_grad()
    @functools.wraps(Plain.forward)
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


start()
partial, exchanged, static = Plain(), Plain(), Static()
partial.forward = functools.partial(partial.forward, scale=2.0)
Static.last = static
models = [Plain(), partial, Shared(16, 4), Described(), static, Cached(), Wrapped(), exchanged]
losses = []
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses += train(model, optimizer)
    if model is exchanged:
        model.forward = nn.Linear.forward.__get__(model.layer)
        losses += train(model, optimizer)
        del model.forward
        Plain.forward = lambda self, x: self.layer(x).tanh()
        losses += train(model, optimizer)
kept = [Shared.forward is nn.Linear.forward, Static.forward(torch.ones(1, 16)).shape, sorted(vars(Plain)), sorted(vars(partial))]
report([model for model in models], [], losses, kept=kept)
