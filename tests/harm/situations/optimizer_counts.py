"""Optimizers, groups, states and schedulers that count accesses."""

import collections

import numpy as np
import torch
from _report import batches, report, start, train
from torch import nn

asked = collections.Counter()
MINE = {"step", "zero_grad", "param_groups", "state", "defaults", "state_dict", "add_param_group"}


class Counting(torch.optim.SGD):
    def __getattribute__(self, name):
        if name in MINE:
            asked[name] += 1
        return super().__getattribute__(name)

    def state_dict(self):
        asked["state_dict called"] += 1
        return super().state_dict()


class Rate(float):
    def __float__(self):
        asked["float of a rate"] += 1
        return float.__float__(self)

    def __mul__(self, other):
        asked["a rate multiplied"] += 1
        return float.__mul__(self, other)

    def __repr__(self):
        asked["a rate shown"] += 1
        return float.__repr__(self)


class Group(dict):
    def __getitem__(self, key):
        asked[f"group {key}"] += 1
        return dict.__getitem__(self, key)

    def get(self, key, default=None):
        asked[f"group get {key}"] += 1
        return dict.get(self, key, default)

    def items(self):
        asked["items of a group"] += 1
        return dict.items(self)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    @property
    def optimizer(self):
        asked["optimizer of a scheduler"] += 1
        return self.held

    @optimizer.setter
    def optimizer(self, optimizer):
        self.held = optimizer


start()
found = []
rates = [Rate(0.01), np.float64(0.01), torch.tensor(0.01), 1]
for rate in rates:
    model = nn.Linear(16, 4)
    optimizer = Counting(model.parameters(), rate)
    optimizer.param_groups[0] = Group(optimizer.param_groups[0])
    scheduler = Schedule(optimizer, lambda step: 1 + step)
    found += train(model, optimizer, batches(5))
    scheduler.step()
    found += train(model, optimizer, batches(20))
counts = dict(sorted(asked.items()))
report([model], [], found, asked=counts)
