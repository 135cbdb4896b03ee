"""Reference counts of batches, outputs, losses, gradients, models and optimizers; reused buffers."""

import sys

import torch
from _report import batches, report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
buffers, losses, counts, used_again = [], [], set(), 0
for number, source in enumerate(batches(40)):
    free = [buffer for buffer in buffers if sys.getrefcount(buffer) <= 4]
    used_again += bool(free)
    x = free[0] if free else torch.empty(8, 16)
    if not free:
        buffers.append(x)
    del free
    x.copy_(source)
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
    objects = model, optimizer, model[0].weight.grad, optimizer.param_groups[0], x, out, loss
    counts.add(tuple(sys.getrefcount(one) for one in objects))
    del out, loss, x, objects, source
report([model], [optimizer], [], numbers=losses, used_again=used_again, buffers=len(buffers), counts=sorted(counts))
