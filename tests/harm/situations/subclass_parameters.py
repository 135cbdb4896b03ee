"""Parameters of a subclass that logs the functions it meets."""

import torch
from _report import ddp, report, start, train
from torch import nn

seen = []


class Logged(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


start()
inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
for module in (inner[0], inner[2]):
    module.weight = Logged(module.weight.data)
model = ddp(inner)
optimizer = torch.optim.Adam(model.parameters())
seen.clear()
losses = train(model, optimizer)
calls = len(seen)
report([model], [optimizer], losses, calls=calls)
