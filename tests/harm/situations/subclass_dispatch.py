"""A wrapper subclass whose __torch_dispatch__ counts calls."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn
from torch.utils._pytree import tree_map

calls = []


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        calls.append(str(function))
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, cls) else t, (args, kwargs or {}))
        return function(*args, **kwargs)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.linear = nn.Identity(), nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(self.outer(x).inner)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
calls.clear()
losses = train(model, optimizer, [Wrapped(x) for x in batches()])
report([model], [optimizer], losses, calls=calls)
