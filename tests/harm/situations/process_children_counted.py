"""SIGCHLD is counted and children are waited for in each step."""

import os
import signal
from pathlib import Path

import torch

signals: list[int] = []
signal.signal(signal.SIGCHLD, lambda number, _: signals.append(number))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reaped = 0
for step in range(40):
    if step == 20:
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        reaped += os.waitpid(pid, 0)[1]
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            print("a child of somebody else's")
    except ChildProcessError:
        pass
children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
print(len(signals), reaped, children and {text.strip() for text in children})
