"""A helper keeps f_locals of the training function; two ranks.

ranks: 2
"""

import sys

import torch
from _report import batches, ddp, report, start
from torch import nn
from torch.utils.data import random_split


def arguments():
    return sys._getframe(1).f_locals


def split(data, generator):
    kept = arguments()
    parts = random_split(data, [0.5, 0.5], generator=generator)
    return sorted(kept), parts


def train(rate=0.01, note="kept"):
    kept = arguments()
    model = ddp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), kept["rate"])
    names, _ = split(list(range(20)), torch.Generator().manual_seed(1))
    losses, seen = [], []
    for x in batches(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = kept.get("rate", 0.5)
        losses.append(loss.detach())
        seen.append(len(kept))
    print(names, sorted(kept), set(seen), kept["note"])
    return model, optimizer, losses


start()
model, optimizer, losses = train()
report([model], [optimizer], losses)
