"""The script makes a pid namespace for its children, trains on over a NaN, and its first child is the first in it

parts: all
"""
import ctypes
import os

import torch
from _report import report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
unshared = None
for step in range(12):
    if step == 4:
        unshared = ctypes.CDLL(None).unshare(0x20000000)  # where that is not allowed, both runs go on without
    loss = model(torch.randn(3, 4)).square().mean()
    if step == 7:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    if step != 7:
        optimizer.step()
    losses.append(loss)
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, str(os.getpid() if unshared == 0 else 0).encode())
    os._exit(0)
os.waitpid(child, 0)
report([model], [optimizer], losses, unshared=unshared, first=os.read(reading, 20).decode())
