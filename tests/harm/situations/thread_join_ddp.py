"""Two DDP ranks wait until no other thread is listed.

ranks: 2
"""

import threading
import time

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn


def names():
    return sorted(thread.name for thread in threading.enumerate())


def alone():
    until = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        thread.join(1)
    return sum(thread.is_alive() for thread in others)


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(40))
time.sleep(1.5)  # a look of every thread of ours
alive, during = alone(), names()
losses += train(model, optimizer, batches(5))
report([model], [optimizer], losses, alive=alive, threads=during)
del model
finish()
print(alone(), names())
