"""The script's gc callbacks are called and removed; a signal comes meanwhile.

parts: all
"""

import gc
import signal
import sys
import time
import warnings

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = train(model, optimizer)
seen, raised = [], []
sys.unraisablehook = lambda about: raised.append(type(about.exc_value).__name__)


def own(phase, info):
    """Note what is asked."""
    seen.append((phase, sorted(info), info["generation"]))
    if phase == "stop":
        raise ValueError("of the script's own")


class Alarm(Exception):
    """Comes from a signal handler."""


def ring(*_):
    raise Alarm


gc.callbacks.append(own)
gc.collect()
last = gc.callbacks[-1] is own
losses += train(model, optimizer, batches(2))
popped = gc.callbacks.pop() is own
gc.callbacks.append(own)
gc.callbacks.remove(own)
signal.signal(signal.SIGALRM, ring)
heap = [[number] for number in range(300_000)]
caught = []
for _ in range(5):
    began = time.perf_counter()
    gc.collect()
    signal.setitimer(signal.ITIMER_REAL, (time.perf_counter() - began) / 4)  # in the middle of the next one
    try:
        gc.collect()
        time.sleep(60)
    except Alarm:
        caught.append(True)
    losses += train(model, optimizer, batches(1))
for callback in tuple(gc.callbacks):
    callback("start", {"generation": 2, "collected": 0, "uncollectable": 0})
losses += train(model, optimizer, batches(2))
kept = gc.callbacks[:]
gc.callbacks.clear()
gc.collect()
losses += train(model, optimizer, batches(2))
gc.callbacks[:] = kept
with warnings.catch_warnings():
    warnings.simplefilter("error")
    losses += train(model, optimizer, batches(3))
gc.callbacks.clear()
del heap
report([model], [optimizer], losses, last=last, popped=popped, caught=caught, raised=sorted(set(raised)), seen=seen[:2])
