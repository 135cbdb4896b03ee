"""What is left of a model, optimizer and DDP that are dropped."""

import gc
import time
import weakref

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
losses, refs = [], []
for seed in range(3):
    inner = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    model = ddp(inner)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses += train(model, optimizer, batches(3, seed=seed))
    refs += [weakref.ref(inner), weakref.ref(model), weakref.ref(optimizer), weakref.ref(inner[0].weight)]
    del inner, model, optimizer
    gc.collect()
deadline = time.monotonic() + 60
while any(ref() is not None for ref in refs) and time.monotonic() < deadline:
    gc.collect()  # a thread that looks at one of them needs its turn to end
    time.sleep(0.01)
alive = [ref() is not None for ref in refs]
live = sum(isinstance(found, torch.nn.Parameter) for found in gc.get_objects())
report([], [], losses, alive=alive, live=live)
