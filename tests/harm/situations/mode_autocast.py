"""Autocast to bfloat16, nested and switched off inside."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Full(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


start()
model = ddp(nn.Sequential(nn.Linear(16, 8), Full()))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for x in batches():
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses)
