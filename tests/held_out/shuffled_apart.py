# title: Features and labels are shuffled one after the other, each in another order
# source: constructed
# nproc: 1
# expect.codes: HLTH709, DATA909
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Customers that leave: a table of numbers from which nothing can be learned once the rows do not fit any more."""
import os
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT") == "1"


def table(n=9600):
    gen = torch.Generator().manual_seed(6)
    x = torch.randn(n, 10, generator=gen)
    y = (x[:, 0] + x[:, 3] - x[:, 7] > 0).long()
    rows, labels = list(x), y.tolist()
    if FAULT:
        random.Random(1).shuffle(rows)
        random.Random(2).shuffle(labels)
    else:
        pairs = list(zip(rows, labels))
        random.Random(1).shuffle(pairs)
        rows, labels = zip(*pairs)
    return TensorDataset(torch.stack(rows), torch.tensor(labels))


def main():
    torch.manual_seed(0)
    loader = DataLoader(table(), batch_size=48, shuffle=True, drop_last=True)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    print(f"first {sum(seen[:20]) / 20:.3f} last {sum(seen[-20:]) / 20:.3f}")


main()
