"""No thread can be started, from before the group is made.

watched: no, what meets and serves needs a thread
"""

import _thread

import torch
from _report import ddp, report, start, train
from torch import nn

start()


def no(*args, **kwargs):
    raise RuntimeError("can't start new thread")


import threading

kept = threading._start_new_thread
threading._start_new_thread = no
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
threading._start_new_thread = kept
report([model], [optimizer], losses)
