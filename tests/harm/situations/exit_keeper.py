"""The script waits for all its children; its end is served for a while.

env: DDPDEBUG_SD_DIR=ddpdebug-runs/sd DDPDEBUG_LINGER=30
"""

import os
import signal
import sys

import torch

heard = []
signal.signal(signal.SIGCHLD, lambda *_: heard.append("child"))
try:
    print("a child", os.wait())
except ChildProcessError:
    print("no child")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(float(model.weight.sum()), float(torch.rand(())), heard, flush=True)
sys.exit(7)
