"""A tensor subclass whose __torch_function__ raises on unknown functions."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Picky(torch.Tensor):
    allowed = {"linear", "detach", "_to", "to", "clone", "requires_grad", "__get__", "size", "dim", "is_floating_point"}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ not in cls.allowed:
            raise TypeError(f"unknown to me: {function.__name__}")
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(nn.Module):
    def forward(self, x):
        return x.as_subclass(torch.Tensor) if False else torch.Tensor._make_subclass(torch.Tensor, x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.linear = nn.Identity(), nn.Linear(16, 4)

    def forward(self, x):
        x = self.outer(x)
        with torch._C.DisableTorchFunctionSubclass():
            x = x.as_subclass(torch.Tensor)
        return self.linear(x)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, [x.as_subclass(Picky) for x in batches()])
report([model], [optimizer], losses)
