"""Custom Functions: needs_input_grad, set_materialize_grads, once_differentiable, setup_context, jvp, mark_dirty

slow: yes
"""

import torch
from _report import batches, report, start, train
from torch import nn

start()
found = []


class F(torch.autograd.Function):
    @staticmethod
    def forward(x, w, k):
        return x @ w, x.sum(), (x > 0)

    @staticmethod
    def setup_context(c, i, out):
        c.save_for_backward(i[0], i[1])
        c.mark_non_differentiable(out[2])
        c.set_materialize_grads(False)

    @staticmethod
    def backward(c, a, b, d):
        x, w = c.saved_tensors
        found.append((c.needs_input_grad, a is None, b is None, d))
        return (
            (a @ w.T if a is not None and c.needs_input_grad[0] else None),
            (x.T @ a if a is not None else None),
            None,
        )


class D(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        c.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(c, g):
        return g * 2


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.w = nn.Parameter(torch.randn(16, 4))
        s.l = nn.Linear(16, 16)

    def forward(s, x):
        y, z, k = F.apply(s.l(x) if found and len(found) % 2 else x, s.w, 1)
        return D.apply(y * 1)


model = N()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(40))
report([model], [optimizer], losses, found=found)
