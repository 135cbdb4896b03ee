"""Functions of torch.cuda are replaced: there seems to be a device; what is asked is counted."""

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
kept = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "is_initialized", "synchronize")}
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = lambda *_: None
losses = train(model, optimizer)
losses += train(model, optimizer, [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)])
for name, function in kept.items():
    setattr(torch.cuda, name, function)
losses += train(model, optimizer)
report([model], [optimizer], losses, available=torch.cuda.is_available())
