"""Iterable data sets, samplers that count, a batch sampler, an own generator.

Splits, records of odd kinds, and a data set that fails in between.
"""

from pathlib import Path

import numpy as np
import torch
from _report import ddp, report, start, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, random_split

calls = {"iter": 0, "len": 0, "stream": 0, "item": 0, "list": 0}


class Counting(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        calls["iter"] += 1
        yield from torch.randperm(self.n).tolist()

    def __len__(self):
        calls["len"] += 1
        return self.n


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(20):
            calls["stream"] += 1
            yield torch.full((16,), i / 20)


class Counted(list):
    """A list of the script's own."""

    def __iter__(self):
        calls["list"] += 1
        return super().__iter__()


class Record:
    """Anything that is no plain data."""

    def __repr__(self):
        calls["list"] += 1
        return "record"


class Recordings(Dataset):
    """Holds records of all kinds, and fails now and then."""

    def __init__(self):
        self.table, self.names = np.arange(48.0).reshape(24, 2), {"low", "high"}
        self.table.flags.writeable = False
        self.mixed = [(Path(f"/data/{i}.bin"), {"kind": i % 3, "x": torch.ones(i + 1)}) for i in range(24)]
        self.odd, self.own, self.empty = [Record()] * 3, Counted(range(5)), []
        self.objects = np.array([None, "a", 3], dtype=object)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        calls["item"] += 1
        if calls["item"] % 10 == 0:
            raise ValueError(i)
        return torch.full((16,), self.table[i, 0] / 48), i % 3


def with_failures(loader):
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)[0]
        except ValueError:
            continue
        except StopIteration:
            return


class Own(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch[0] * 2


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
rows = TensorDataset(torch.randn(32, 16))
generator = torch.Generator().manual_seed(7)
losses = []
for _ in range(2):
    losses += train(model, optimizer, (b[0] for b in DataLoader(rows, 8, sampler=Counting(32))))
    losses += train(model, optimizer, DataLoader(Stream(), 8))
    losses += train(model, optimizer, Own(rows, 8, shuffle=True, generator=generator))
    losses += train(model, optimizer, (b[0] for b in DataLoader(rows, batch_sampler=[[0, 1], [2, 3]])))
first, second = random_split(rows, [24, 8])
losses += train(model, optimizer, (b[0] for b in DataLoader(first, 8, shuffle=True)))
losses += train(model, optimizer, (b[0] for b in DataLoader(Subset(second, torch.tensor([3, 1, 2])), 3)))
recordings = DataLoader(Recordings(), 4, shuffle=True)
for _ in range(3):
    losses += train(model, optimizer, with_failures(recordings))
iterator = iter(DataLoader(rows, 8))
next(iterator)
report([model], [optimizer], losses, calls=calls, generator=generator.get_state().sum(), left=len(list(iterator)))
