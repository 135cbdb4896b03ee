"""An exception after the script has deleted sys.excepthook."""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
report([model], [optimizer], train(model, optimizer))
del sys.excepthook
raise ValueError(len(sys.argv))
