"""Modules of torch and of the script are reloaded while training."""

import importlib
import sys

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
before = set(sys.modules)
losses += train(model, optimizer, batches(40))
new = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] != "ddpdebug")
for name in ("torch.nn.parallel.distributed", "torch.optim.sgd", "torch.nn.modules.loss", "torch.nn.utils.clip_grad"):
    importlib.reload(importlib.import_module(name))
other = nn.Linear(16, 4)
again = sys.modules["torch.optim.sgd"].SGD(other.parameters(), 0.01)
loss_of = sys.modules["torch.nn.modules.loss"].MSELoss()
losses += train(other, again, batches(10), lambda out: loss_of(out, torch.zeros_like(out)))
losses += train(model, optimizer, batches(10))
sys.modules["torch.nn.utils.clip_grad"].clip_grad_norm_(other.parameters(), 1.0)
report([model, other], [optimizer, again], losses, new=new)
