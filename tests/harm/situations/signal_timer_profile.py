"""A 5 ms timer whose handler counts; a full wakeup descriptor.

ranks: 1
"""

import os
import signal

import torch
from _report import batches, ddp, report, start, train
from torch import nn

ticks = 0


def handler(number, frame):
    global ticks
    ticks += 1


start()
read, write = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(write, warn_on_full_buffer=False)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer, batches(60))
signal.setitimer(signal.ITIMER_REAL, 0)
print("ticked", ticks > 0, "woken", set(os.read(read, 4096)) == {signal.SIGALRM}, signal.set_wakeup_fd(-1) == write)
report([model], [optimizer], losses)
