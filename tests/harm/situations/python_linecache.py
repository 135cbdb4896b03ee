"""A module is written anew while training, NaN batches included: lines that `linecache` gives.

run: alone
"""

import importlib
import linecache
import sys
from pathlib import Path

import torch
from _report import batches, report, start
from torch import nn

TEXT = """import torch.nn as nn, torch.nn.functional as F
VERSION = {0}
def loss_of(y):
    return F.mse_loss(y, y.detach() * {0})
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(16, {0} + 2)
    def forward(self, x):
        return self.l(x)
"""
start()
sys.path.insert(0, "")
sys.dont_write_bytecode = True
place, lines, losses = Path("generated.py"), [], []
place.write_text(TEXT.format(1))
import generated  # noqa: E402

for version in (1, 2):
    model = generated.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, x in enumerate(batches(8)):
        if index == 5:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = generated.loss_of(model(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    place.write_text(TEXT.format(version + 1))
    lines.append(generated.__file__ in linecache.cache)
    lines.append(linecache.getline(generated.__file__, 2))
    linecache.clearcache()
    importlib.reload(generated)
place.unlink()
report([model], [optimizer], losses, lines=lines)
