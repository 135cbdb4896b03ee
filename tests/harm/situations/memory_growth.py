"""Two thousand small steps: resident memory, open files and threads afterwards.

slow: yes
"""

import os
import resource
import threading

import torch
from _report import at_most, batches, ddp, report, start, train
from torch import nn


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 2**20


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
train(model, optimizer, batches(300))
before = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
losses = train(model, optimizer, batches(2000, seed=3))
after = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
report([model], [optimizer], losses[-5:])
for name, a, b, more in zip(("MiB", "files", "threads"), before, after, (20, 2, 1), strict=True):
    at_most(name, b - a, more)
