"""Garbage collection is off, with callbacks and weak references."""

import gc
import weakref

import torch
from _report import batches, report, start, train
from torch import nn

start()
calls = []
gc.callbacks.append(lambda phase, info: calls.append(phase))
gc.disable()
gc.freeze()
model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = train(model, optimizer)
outs = []
for x in batches():
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    outs.append((weakref.ref(out), weakref.ref(loss), weakref.ref(x)))
    del out, loss, x
alive = [ref() is not None for refs in outs for ref in refs]
state = gc.isenabled(), calls, gc.get_threshold(), gc.get_debug()
report([model], [optimizer], losses, alive=alive, state=state)
