"""time.time goes backwards, time.sleep and time.monotonic are patched by the script."""

import datetime
import time

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
real, calls = time.time, []


def backwards():
    calls.append(1)
    return 1e9 - len(calls) * 3600


time.time = backwards
time.perf_counter = lambda: float(len(calls) % 3)
time.monotonic_ns = lambda: -1
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
time.time = lambda: float("nan")
losses += train(model, optimizer, batches(5))
time.time = real
report([model], [optimizer], losses)
