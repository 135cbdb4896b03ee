"""A part of the script runs under FakeTensorMode."""

import torch
from _report import batches, report, start, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

start()
with FakeTensorMode():
    sketch = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    rehearsal = torch.optim.Adam(sketch.parameters())
    for _ in range(2):
        sketch(torch.ones(8, 16)).square().mean().backward()
        rehearsal.step()
        rehearsal.zero_grad()
model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters())
losses = train(model, optimizer, batches())
report([model], [optimizer], losses, sketch=type(sketch[0].weight.data).__name__)
