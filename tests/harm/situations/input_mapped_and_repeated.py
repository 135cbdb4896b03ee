"""A mapped file of 3 GiB that ends before its tensor is a batch, and a mask is expanded to 1.5 GiB: peak memory.

parts: all
"""

import os
import resource
import tempfile

import torch
from _report import at_most, report, start
from torch import nn

SIZE = 3 << 30


def mapped():
    """Return a tensor over a file that is shorter than it, as one is that was cut after it was mapped."""
    handle, path = tempfile.mkstemp()
    os.ftruncate(handle, SIZE)
    table = torch.from_file(path, shared=True, size=SIZE // 4, dtype=torch.float32).view(-1, 1024)
    os.ftruncate(handle, 1 << 20)
    os.close(handle)
    os.remove(path)
    return table


class Masked(nn.Module):
    def forward(self, x, mask):
        return x + mask[0, 0, : x.shape[1]], mask


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.masked = nn.Linear(1024, 8), Masked()

    def forward(self, table, rows):
        mask = torch.zeros(1, 1, 1024).expand(512, 768, 1024)
        x, mask = self.masked(self.first(table[rows] + rows[:, None] / 100), mask)
        return x, mask


start()
table, model = mapped(), Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(4)
losses = []
for _ in range(8):
    x, _ = model(table, torch.randint(0, 200, (6,), generator=generator))
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses)
at_most("peak MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 60)
