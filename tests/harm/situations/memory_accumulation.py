"""Eight micro-batches of 40 MiB a step: peak memory.

ranks: 1
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
losses, alive = [], 0
for _ in range(3):
    optimizer.zero_grad()
    seen = []
    for _ in range(8):
        x = torch.full((40 * 2**20 // 64, 16), 1.0)
        seen.append(weakref.ref(x))
        loss = model(x)[:4].pow(2).mean() / 8
        loss.backward()
        losses.append(loss.detach())
        del x, loss
    gc.collect()
    alive += sum(ref() is not None for ref in seen)
    optimizer.step()
report([model], [optimizer], losses, alive=alive)
at_most("peak MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 60)
