"""An unreachable hub is reported once.

env: DDPDEBUG_HUB=http://127.0.0.1:9
"""

import os
import signal
import socket
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
print(float(model.weight.sum()), float(torch.rand(())), heard, socket.getdefaulttimeout(), flush=True)
sys.exit(7)
