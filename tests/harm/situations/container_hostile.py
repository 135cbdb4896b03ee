"""Batches with objects whose every special method raises."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Hostile:
    def __init__(self, x):
        object.__setattr__(self, "x", x)

    def _no(self, *args):
        raise RuntimeError("hands off")

    __eq__ = __len__ = __bool__ = __repr__ = __str__ = __hash__ = __iter__ = __getitem__ = __contains__ = _no
    __reduce__ = __reduce_ex__ = __deepcopy__ = __copy__ = __dir__ = __format__ = __setattr__ = __delattr__ = _no

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Linear(16, 4)

    def forward(self, batch, *, extra):
        batch = self.first(batch)
        return self.second(object.__getattribute__(batch[0], "x")), batch


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches():
    loss = model([Hostile(x), {"k": Hostile(None)}], extra=Hostile(1))[0].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses)
