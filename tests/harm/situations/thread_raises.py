"""A training thread raises: threading.excepthook sees it, the main thread goes on."""

import threading

import torch
from _report import batches, report, start, train
from torch import nn


def go():
    train(nn.Linear(16, 4), optimizer, batches(3))
    raise ValueError("in a thread")


start()
caught = []
threading.excepthook = lambda args: caught.append((args.exc_type.__name__, str(args.exc_value)))
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
thread = threading.Thread(target=go)
thread.start()
thread.join()
losses += train(model, optimizer)
report([model], [optimizer], losses, caught=caught)
