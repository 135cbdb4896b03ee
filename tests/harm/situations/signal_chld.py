"""A SIGCHLD handler that reaps any child.

slow: yes
"""

import os
import signal
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
seen = []


def reap(n, f):
    while True:
        try:
            pid, st = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        seen.append(st)


signal.signal(signal.SIGCHLD, reap)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for i, x in enumerate(batches(60)):
    losses += train(model, optimizer, [x])
    if i % 10 == 5:
        if (pid := os.fork()) == 0:
            os._exit(i)
        n = len(seen)
        t = time.time()
        while len(seen) == n and time.time() < t + 10:
            time.sleep(0.01)
    if i == 30:
        x = x.clone()
        x[0, 0] = float("nan")
        out = model(x).sum()
        out.backward()
        optimizer.zero_grad()
time.sleep(1.5)
report([model], [optimizer], losses, seen=seen)
