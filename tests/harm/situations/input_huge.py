"""A batch of 150 MiB: peak memory, and its end by `del`.

slow: yes
"""

import ctypes
import gc
import resource
import weakref

import torch
from _report import at_most, ddp, report, start
from torch import nn

M_MMAP_THRESHOLD = -3
# Left to itself, glibc keeps some large blocks that were freed: up to 70 MiB, another number in each run.
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
start()
model = ddp(nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses, alive = [], []
for _ in range(3):
    x = torch.full((150 * 2**20 // 64, 16), 1.0)
    batch = weakref.ref(x)
    optimizer.zero_grad()
    loss = model(x)[:4].pow(2).mean()
    loss.backward()
    del x
    gc.collect()
    alive.append(batch() is not None)
    optimizer.step()
    losses.append(loss.detach())
    del loss
report([model], [optimizer], losses, alive=alive)
at_most("peak MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 60)
