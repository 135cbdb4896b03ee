"""Builtins replaced by the script: isinstance, len, sorted, id, getattr, zip, print, super.

slow: yes
"""

import builtins
import sys
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(20))
calls = {}
here = __file__


def wrap(name):
    real = getattr(builtins, name)

    def f(*a, **k):
        if sys._getframe(1).f_code.co_filename == here:
            calls[name] = calls.get(name, 0) + 1
        return real(*a, **k)

    return real, f


keep = {
    n: wrap(n)
    for n in ("len", "sorted", "id", "getattr", "zip", "sum", "min", "any", "next", "iter", "hasattr", "repr")
}
for n, (r, f) in keep.items():
    setattr(builtins, n, f)
losses += train(model, optimizer, batches(40))
time.sleep(1.1)
losses += train(model, optimizer, batches(40))
for n, (r, f) in keep.items():
    setattr(builtins, n, r)
report([model], [optimizer], losses, calls=calls)
