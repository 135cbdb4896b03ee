"""A read-only working directory.

run: alone
under: cd /proc/self && "$@"
watched: no, there may be no place for a run directory
"""

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses)
