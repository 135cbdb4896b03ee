"""The script runs all exit handlers in the middle of training, then forgets them, and trains on."""

import atexit

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
atexit.register(print, "handler")
losses = train(model, optimizer)
atexit._run_exitfuncs()
losses += train(model, optimizer)
atexit.register(print, "forgotten")
atexit._clear()
losses += train(model, optimizer)
atexit.register(print, "last", atexit._ncallbacks())
report([model], [optimizer], losses)
