"""The process forbids that others look into it, and dies with its parent; a NaN batch, a subprocess."""

import ctypes
import subprocess

import torch
from _report import ddp, report, start, train
from torch import nn

start()
prctl = ctypes.CDLL(None, use_errno=True).prctl
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
print(prctl(4, 0, 0, 0, 0), prctl(1, 15, 0, 0, 0), prctl(38, 1, 0, 0, 0))
losses += train(model, optimizer, [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)])
print(prctl(3, 0, 0, 0, 0), subprocess.run(["echo", "hello"], capture_output=True, check=True).stdout)
losses += train(model, optimizer)
report([model], [optimizer], losses)
