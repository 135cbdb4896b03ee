# title: A cosine schedule over epochs is stepped after every batch, and the rate swings up and down
# source: constructed
# nproc: 1
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Digits of seven segments, ten epochs with a rate that falls to zero."""
import os

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT") == "1"
EPOCHS = 8
SEGMENTS = torch.tensor([0x7E, 0x30, 0x6D, 0x79, 0x33, 0x5B, 0x5F, 0x70, 0x7F, 0x7B])


def digits(n=480):
    gen = torch.Generator().manual_seed(2)
    y = torch.randint(10, (n,), generator=gen)
    x = (SEGMENTS[y][:, None] >> torch.arange(7) & 1).float()
    return TensorDataset(x - 0.5 + 0.5 * torch.randn(n, 7, generator=gen), y)


def train_one_epoch(model, loader, optimizer, scheduler, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FAULT:
            scheduler.step()
    if not FAULT:
        scheduler.step()
    return loss.item()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 10))
loader = DataLoader(digits(), batch_size=32, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
for epoch in range(EPOCHS):
    loss = train_one_epoch(model, loader, optimizer, scheduler, nn.CrossEntropyLoss())
    print(f"epoch {epoch} loss {loss:.4f} lr {scheduler.get_last_lr()[0]:.4f}")
