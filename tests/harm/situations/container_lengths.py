"""Data sets, samplers and batches that count accesses."""

import collections

import torch
from _report import report, start, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

calls = collections.Counter()


class Lazy:
    """Makes up its class, attributes and length, as proxies do."""

    @property
    def __class__(self):
        calls["class"] += 1
        return torch.Tensor

    def __getattr__(self, name):
        calls[f"attribute {name}"] += 1
        raise AttributeError(name)

    def __len__(self):
        calls["length of a proxy"] += 1
        return 1


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
        self.lazy, self.many = Lazy(), [Lazy()]

    def __len__(self):
        calls["length"] += 1
        return len(self.rows)

    def __getitem__(self, index):
        calls["item"] += 1
        return self.rows[index]


class Stream(IterableDataset):
    def __len__(self):
        calls["length of a stream"] += 1
        return 48

    def __iter__(self):
        return iter(Rows().rows)


class Own(Sampler):
    def __getattr__(self, name):
        calls[f"sampler's {name}"] += 1
        raise AttributeError(name)

    def __len__(self):
        calls["length of a sampler"] += 1
        return 48

    def __iter__(self):
        return iter(range(47, -1, -1))


def lately(loader):
    lazy = Lazy()
    for _ in range(3):
        yield from loader
    return lazy


start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for loader in (
    DataLoader(Rows(), 8, shuffle=True),
    DataLoader(Stream(), 8),
    DataLoader(Rows(), 8, sampler=Own()),
    DataLoader(Rows(), 8, collate_fn=lambda rows: torch.stack(rows)),
):
    losses += train(model, optimizer, lately(loader))
report([model], [optimizer], losses, calls=sorted(calls.items()))
