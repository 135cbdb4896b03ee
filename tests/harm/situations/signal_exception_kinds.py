"""Handlers that raise KeyboardInterrupt, SystemExit, a BaseException, TimeoutError, StopIteration in turn.

slow: yes
"""

import random
import signal

import torch
from _report import start
from torch import nn


class Mine(BaseException):
    pass


kinds = [KeyboardInterrupt, SystemExit, Mine, TimeoutError, StopIteration, MemoryError, RecursionError, OSError]
raised, caught, others = [], [], []


def handler(number, frame):
    kind = kinds[len(raised) % len(kinds)]
    raised.append(kind)
    raise kind("from the handler")


def step():
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def kind_of(error):
    """Return what the handler has raised; a StopIteration in a generator of torch's comes as its cause."""
    return type(error.__cause__ if isinstance(error.__cause__, StopIteration) else error)


start()
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x = torch.randn(4, 64)
step()
step()
signal.signal(signal.SIGALRM, handler)
for _ in range(96):
    torch.set_grad_enabled(True)  # the one before may have come while torch had it off
    before = len(raised)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + random.random() * 0.01)
        while len(raised) == before:
            step()
    except BaseException as error:
        caught.append(kind_of(error))
signal.setitimer(signal.ITIMER_REAL, 0)
print("raised", len(raised), "caught", len(caught), "the same", caught == raised)
