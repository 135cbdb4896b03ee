"""Strict ASCII streams, C locale, module and class names beyond ASCII, NaN.

run: alone
env: PYTHONIOENCODING=ascii:strict LC_ALL=C LANG=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 TMPDIR=/nowhere PYTHONDONTWRITEBYTECODE=1
"""

import sys

import torch
from _report import batches, report, start
from torch import nn


class Modèle(nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = nn.Linear(16, 8)
        self.выход = nn.Linear(8, 4)

    def forward(self, x):
        return self.выход(self.größe(x).log())


start()
model = Modèle()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for x in batches(12):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
try:
    print("größe")
except UnicodeEncodeError as error:
    print(error.reason)
report([model], [optimizer], losses, streams=[(s.encoding, s.errors) for s in (sys.stdout, sys.stderr)])
