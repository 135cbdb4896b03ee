"""Two ranks of one seed draw from every generator.

ranks: 2
parts: all
"""

import random

import numpy as np
import torch
from _report import batches, ddp, finish, report, start
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Draws as it is read."""

    def __init__(self):
        self.rows = torch.cat(list(batches(20)))
        self.kinds = torch.randint(0, 4, (160,), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 160

    def __getitem__(self, i):
        return self.rows[i] * random.uniform(0.9, 1.1), self.kinds[i]


def loop(model, optimizer):
    own, third, other = torch.Generator().manual_seed(3), random.Random(5), np.random.default_rng(4)
    losses = []
    for x, kind in DataLoader(Noisy(), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        x = x + torch.randn_like(x) * float(np.random.beta(2, 2)) + torch.rand(16, generator=own) * third.random()
        x = x[torch.from_numpy(other.permutation(8))]
        loss = F.cross_entropy(model(x), kind)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, (own.get_state().sum().item(), third.random(), other.random())


start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses, drawn = loop(model, optimizer)
report([model], [optimizer], losses, drawn=drawn)
del model
finish()
