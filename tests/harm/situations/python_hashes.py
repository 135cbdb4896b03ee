"""Classes and objects with `__hash__` and `__eq__` of their own: models, optimizers, loaders, a metaclass; two ranks.

ranks: 2
"""

import torch
from _report import ddp, finish, report, start
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

counts = {}


def count(key):
    counts[key] = counts.get(key, 0) + 1


class Meta(type):
    def __hash__(cls):
        count(f"hash of {cls.__name__}")
        return id(cls) >> 4

    def __eq__(cls, other):
        count(f"eq of {cls.__name__}")
        return cls is other


class Counted(metaclass=Meta):
    def __hash__(self):
        count(f"hash of a {type(self).__name__}")
        return id(self) >> 4

    def __eq__(self, other):
        count(f"eq of a {type(self).__name__}")
        return self is other


class Net(Counted, nn.Linear):
    rate = 0.5

    def forward(self, x):
        return super().forward(x) * self.rate


class Loss(Counted, nn.MSELoss):
    pass


class Optimizer(Counted, torch.optim.SGD):
    pass


class Data(Counted, Dataset):
    def __init__(self):
        self.scale = Counted()

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((16,), i / 32)


class Sampler(Counted, SequentialSampler):
    pass


class Refusing(DataLoader):
    """As a dataclass is, it cannot be a key."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("compared")


start()
data = Data()
model = ddp(nn.Sequential(Net(16, 4)))
optimizer, loss_of = Optimizer(model.parameters(), 0.1), Loss()
loader = Refusing(data, 4, sampler=Sampler(data))
losses, seen = [], []
for epoch in range(5):
    for x in loader:
        counts.clear()
        loss = loss_of(model(x), torch.ones(4, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seen.append(sorted(counts.items()))
    model.eval()
    with torch.no_grad():
        loss_of(model(x), torch.ones(4, 4))
    model.train()
report([model], [optimizer], losses, seen=seen, last=sorted(counts.items()))
del model
finish()
