"""python -W error: every warning is an exception.

run: alone
ranks: 1
python: -W error -W ignore::DeprecationWarning:torch -W ignore::DeprecationWarning:importlib
"""

import warnings

import torch
from _report import ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
try:
    warnings.warn("mine")
    caught = False
except UserWarning:
    caught = True
report([model], [optimizer], losses, caught=caught, filters=len(warnings.filters))
del model
finish()
