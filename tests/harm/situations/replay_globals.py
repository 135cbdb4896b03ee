"""A forward counts, draws and iterates outside the module; NaN batches.

ranks: 2
"""

import itertools
import random

import numpy as np
import torch
from _report import batches, ddp, report, start, train
from torch import nn

calls, own, series = 0, random.Random(1), itertools.count()
noise, draws = torch.Generator().manual_seed(1), np.random.default_rng(1)


class Meter:
    seen = 0

    def __init__(self):
        self.total = np.zeros(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.meter = nn.Linear(16, 4), Meter()

    def forward(self, x):
        global calls
        calls += 1
        Meter.seen += 1
        self.meter.total += 1
        warm = min(1.0, calls / 10) + 0.01 * next(series) + 0.01 * float(self.meter.total[0])
        drawn = own.random() + draws.random() + torch.rand(4, generator=noise)
        return self.linear(x) * warm + drawn


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer.register_step_pre_hook(lambda *_: [p.grad.nan_to_num_(0) for p in model.parameters()] and None)
data = [x / 0 * 0 if number in {2, 5} else x for number, x in enumerate(batches(9))]
losses = train(model, optimizer, data)
counts = calls, Meter.seen, model.module.meter.total.tolist(), next(series), own.random(), draws.random()
report([model], [optimizer], losses, counts=counts, noise=noise.get_state().sum().item())
