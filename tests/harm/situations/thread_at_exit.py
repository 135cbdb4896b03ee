"""A daemon thread is still training when the script ends."""

import threading

import torch
from _report import batches, start, train
from torch import nn


def forever():
    own = nn.Linear(16, 4)
    helper = torch.optim.SGD(own.parameters(), 0.1)
    while True:
        train(own, helper, batches(5, seed=3))
        started.set()


start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
started = threading.Event()
threading.Thread(target=forever, daemon=True).start()
started.wait()
print("losses", [float(loss).hex() for loss in losses], flush=True)
