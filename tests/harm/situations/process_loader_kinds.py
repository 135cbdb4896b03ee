"""Loaders of the script: iterable data sets, samplers that count, a batch sampler, a subclass, a generator of its own."""

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

calls = {"iter": 0, "len": 0, "stream": 0}


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
iterator = iter(DataLoader(rows, 8))
next(iterator)
report([model], [optimizer], losses, calls=calls, generator=generator.get_state().sum(), left=len(list(iterator)))
