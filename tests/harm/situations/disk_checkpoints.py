"""Checkpoints of model, optimizer and random state, byte for byte."""

import hashlib
import random

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)
losses, digests = [], []
for epoch in range(6):
    losses += train(model, optimizer, batches(8, seed=epoch))
    scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate()),
        "whole": model,
    }
    torch.save(state, f"epoch{epoch}.pt")
    digests.append(hashlib.sha256(open(f"epoch{epoch}.pt", "rb").read()).hexdigest()[:16])
    if epoch == 3:
        state = torch.load("epoch1.pt", weights_only=False, mmap=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
report([model], [optimizer], losses, digests=digests)
