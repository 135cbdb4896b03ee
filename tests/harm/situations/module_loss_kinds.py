"""Loss modules that return a tuple, a dict, a sparse tensor, or raise.

parts: all
"""

import torch
from _report import batches, digest, report, start
from torch import nn
from torch.nn.modules.loss import _Loss


class Pair(_Loss):
    def forward(self, x, y):
        return (x - y).square().mean(), {"worst": (x - y).abs().max()}


class Named(nn.MSELoss):
    calls = 0

    def forward(self, x, y):
        self.calls += 1
        return {"loss": super().forward(x, y), "calls": self.calls}


class Sparse(_Loss):
    def forward(self, x, y):
        return (x - y).square().mean().to_sparse()


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Subclassed(_Loss):
    def forward(self, x, y):
        return (x - y).mean().as_subclass(Own)


class Raising(_Loss):
    def forward(self, x, y):
        raise LookupError("no loss today")


class Lying(nn.L1Loss):
    __class__ = property(lambda self: 1 / 0)


def evaluate():
    model.eval()
    values = []
    with torch.no_grad():
        for x in batches(3, seed=7):
            out = model(x)
            values += [criterion(out, x[:, :4]), *(kind(out, x[:, :4]) for kind in odd)]
            values.append(nn.L1Loss(reduction="none")(out, x[:, :4]))
            try:
                Raising()(out, x[:, :4])
            except LookupError as error:
                values.append(str(error))
    model.train()
    return [value.to_dense() if isinstance(value, torch.Tensor) else value for value in values]


start()
seen = []
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
criterion, odd = nn.SmoothL1Loss(), [Pair(), Named(), Sparse(), Subclassed(), Lying()]
optimizer = torch.optim.SGD([*model.parameters()], 1e-2)
losses, found = [], []
for epoch in range(4):
    for x in batches(5):
        optimizer.zero_grad()
        loss = criterion(model(x), x[:, :4]) + odd[0](model(x), x[:, :4])[0] + odd[1](model(x), x[:, :4])["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found.append(digest(evaluate()))
hooks = torch.nn.modules.module
report([model], [optimizer], losses, found=found, calls=odd[1].calls, seen=seen)
report(state=[sorted(vars(kind)) for kind in odd[:4]], hooks=len(criterion._forward_hooks))
