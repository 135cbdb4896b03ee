"""python -OO: no asserts, no docstrings.

run: alone
python: -OO
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses, flags=sys.flags.optimize, doc=__doc__)
