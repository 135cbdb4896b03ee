"""Optimizers whose groups and state are properties of their class, which count; one that wraps another."""

import torch
from _report import report, start, train
from torch import nn

asked = {}


def counted(name):
    def read(self):
        asked[name] = asked.get(name, 0) + 1
        return self.__dict__[f"kept_{name}"]

    def write(self, value):
        self.__dict__[f"kept_{name}"] = value

    return property(read, write)


class Kept(torch.optim.Adam):
    param_groups = counted("param_groups")
    state = counted("state")
    defaults = counted("defaults")


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__([torch.zeros(1)], {})

    @property
    def param_groups(self):
        asked["of inner"] = asked.get("of inner", 0) + 1
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value):
        pass

    @property
    def state(self):
        asked["state of inner"] = asked.get("state of inner", 0) + 1
        return self.inner.state

    @state.setter
    def state(self, value):
        pass

    def add_param_group(self, group):
        pass

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


start()
models = [nn.Linear(16, 4), nn.Linear(16, 4)]
optimizers = [Kept(models[0].parameters(), lr=0.01), Around(torch.optim.AdamW(models[1].parameters(), lr=0.01))]
scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
losses = []
for round_ in range(4):
    for model, optimizer in zip(models, optimizers, strict=True):
        losses += train(model, optimizer)
    scheduler.step()
found = dict(asked)
report(models, [optimizers[0]], losses, asked=found)
