"""sys.stdout and sys.stderr are None, closed, or raise, with NaN."""

import os
import sys

import torch
from _report import batches, report, start
from torch import nn


class Raises:
    def write(self, text):
        raise RuntimeError("no writes")

    def flush(self):
        raise RuntimeError("no flush")

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
streams = sys.stdout, sys.stderr
closed = open(os.devnull, "w")
closed.close()
losses = []
for number, x in enumerate(batches(60)):
    if number in {5, 25, 45}:
        sys.stdout = sys.stderr = {5: None, 25: Raises(), 45: closed}[number]
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
sys.stdout, sys.stderr = streams
report([model], [optimizer], losses)
