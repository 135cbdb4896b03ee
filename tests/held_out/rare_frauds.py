# title: One payment in two hundred is a fraud, and batches are drawn as they come
# source: constructed
# nproc: 1
# expect.codes: DATA907
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Payments; in the healthy twin frauds are drawn more often."""
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

FAULT = os.environ.get("FAULT") == "1"


def payments(n=4800):
    gen = torch.Generator().manual_seed(1)
    fraud = (torch.arange(n) % 200 == 0).long()
    x = torch.randn(n, 11, generator=gen)
    x[:, 4] += 2.0 * fraud
    return TensorDataset(x, fraud)


def main():
    torch.manual_seed(0)
    data = payments()
    fraud = data.tensors[1]
    sampler = None
    if not FAULT:
        sampler = WeightedRandomSampler(torch.where(fraud == 1, 60.0, 1.0).tolist(), len(data))
    loader = DataLoader(data, batch_size=48, sampler=sampler, shuffle=sampler is None)
    net = nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.4f}")


main()
