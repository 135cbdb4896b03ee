"""Exit handlers that train, raise, register another; their order.

run: alone
"""

import atexit

import torch
from _report import batches, report, start, train
from torch import nn


def last():
    print("last, registered first")


def nested():
    print("nested")
    atexit.register(print, "registered by a handler")


def angry():
    raise RuntimeError("in an exit handler")


def more():
    losses = train(model, optimizer, batches(2))
    report([model], [optimizer], losses)


start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
train(model, optimizer)
for handler in (last, nested, angry, more):
    atexit.register(handler)
