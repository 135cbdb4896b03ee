"""A SIGALRM handler raises an Exception anywhere; the script catches each one.

slow: yes
"""

import random
import signal

import torch
from _report import ddp, start
from torch import nn


class Preempted(Exception):
    pass


raised = caught = 0


def handler(number, frame):
    global raised
    raised += 1
    raise Preempted


def step():
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


start()
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x = torch.randn(4, 64)
step()
step()
signal.signal(signal.SIGALRM, handler)
for _ in range(150):
    torch.set_grad_enabled(True)  # the one before may have come while torch had it off
    before = raised
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + random.random() * 0.01)
        while raised == before:
            step()
    except Preempted:
        caught += 1
print("raised", raised, "caught", caught)
