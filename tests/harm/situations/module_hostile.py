"""Models, losses, optimizers and loaders that refuse `bool`, `==`, `len` and `iter`.

ranks: 2
"""

import torch
from _report import batches, ddp, finish, report, start
from torch import nn

asked = []


class Hostile:
    def __bool__(self):
        asked.append(f"bool {type(self).__name__}")
        raise RuntimeError("neither true nor false")

    def __eq__(self, other):
        asked.append(f"eq {type(self).__name__}")
        raise RuntimeError("not to be compared")

    def __hash__(self):
        return id(self) >> 4

    def __repr__(self):
        asked.append(f"repr {type(self).__name__}")
        raise RuntimeError("not to be shown")

    def __len__(self):
        asked.append(f"len {type(self).__name__}")
        raise RuntimeError("no length")

    def __dir__(self):
        asked.append(f"dir {type(self).__name__}")
        raise RuntimeError("no names")


class Net(Hostile, nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x)

    def __getattr__(self, name):
        if name not in {"layer", "_is_full_backward_hook"}:
            asked.append(f"getattr {name}")
        return super().__getattr__(name)


class Loss(Hostile, nn.Module):
    def forward(self, x):
        return x.square().mean()


class Optimizer(Hostile, torch.optim.SGD):
    pass


class Loader(Hostile):
    def __iter__(self):
        return batches(30)


start()
model, loss_of, data = Net(), Loss(), Loader()
wrapped = ddp(model)
optimizer = Optimizer(model.parameters(), 0.01)
losses = []
for number, x in enumerate(data):
    if number == 20:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = loss_of(wrapped(x))
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
seen = sorted(set(asked))
report([model], [optimizer], losses, asked=seen)
del wrapped
finish()
