"""No further thread can be started after the first steps."""

import threading

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, batches(2))


def no(self):
    raise RuntimeError("can't start new thread")


kept = threading.Thread.start
threading.Thread.start = no
losses += train(model, optimizer, [torch.full((8, 16), 1e4), *batches(20)])
threading.Thread.start = kept
report([model], [optimizer], losses)
