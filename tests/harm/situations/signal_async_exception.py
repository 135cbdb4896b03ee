"""Another thread throws exceptions into the training thread, which catches each.

slow: yes
"""

import ctypes
import threading
import time

import torch
from _report import start
from torch import nn


class Thrown(Exception):
    pass


def throw():
    me = threading.main_thread().ident
    while not over:
        ready.wait()
        ready.clear()
        time.sleep(0.002)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(Thrown))


def step():
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


start()
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x = torch.randn(4, 64)
step()
over, ready, caught = False, threading.Event(), 0
thread = threading.Thread(target=throw, daemon=True)
thread.start()
for _ in range(30):
    limit = time.monotonic() + 30
    try:
        ready.set()
        while time.monotonic() < limit:
            step()
    except Thrown:
        caught += 1
print("caught", caught)
