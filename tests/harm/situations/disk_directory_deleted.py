"""The working directory is deleted before training starts.

watched: no, there is no place for a run directory
"""

import os

import torch
from _report import ddp, report, start, train
from torch import nn

start()
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
try:
    where = os.getcwd()
except FileNotFoundError:
    where = "nowhere"
report([model], [optimizer], losses, where=where)
