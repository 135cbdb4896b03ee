"""The script replaces json.dumps, open, print and os.replace by functions that raise.

watched: no, nothing can be written then
"""

import builtins
import json
import os

import torch
from _report import ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
kept = json.dumps, builtins.open, os.replace, builtins.print


def no(*args, **kwargs):
    raise RuntimeError("replaced by the script")


json.dumps = builtins.open = os.replace = builtins.print = no
losses += train(model, optimizer)
json.dumps, builtins.open, os.replace, builtins.print = kept
report([model], [optimizer], losses)
