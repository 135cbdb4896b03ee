"""The script joins all threads that it lists."""

import threading
import time

import torch
from _report import batches, report, start, train
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
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
before = names()
losses = train(model, optimizer, batches(40))
alive, during = alone(), names()
thread = threading.Thread(target=lambda: losses.extend(train(model, optimizer, batches(5))))
thread.start()
thread.join()
time.sleep(1.5)  # a look of every thread of ours
report([model], [optimizer], losses, alive=alive, threads=[before, during, names()], next=thread.name)
