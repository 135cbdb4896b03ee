"""Threads that the script can list, and its hooks."""

import sys
import threading

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
seen = [thread.name for thread in threading.enumerate() if not thread.daemon]
hooks = [threading.excepthook is threading.__excepthook__, sys.excepthook.__name__, sys.unraisablehook.__name__]
traced = [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()]
report([model], [optimizer], losses, seen=seen, hooks=hooks[:1] + hooks[2:], traced=traced)
