"""os.wait() without children of the script raises; wait4 of any

slow: yes
"""

import os
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
found = []
for k in range(5):
    losses += train(model, optimizer, batches(20))
    time.sleep(0.4)
    for call in (
        os.wait,
        lambda: os.waitpid(-1, os.WNOHANG),
        lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG),
        lambda: os.wait3(0),
    ):
        try:
            found.append(call())
        except ChildProcessError as e:
            found.append(e.errno)
report([model], [optimizer], losses, found=found)
