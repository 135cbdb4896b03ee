"""A custom Function raises in backward: sys.exc_info, contexts, notes and tracebacks.

slow: yes
"""

import sys
import traceback

import torch
from _report import batches, report, start, train
from torch import nn

start()


class F(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        return x * 2

    @staticmethod
    def backward(c, g):
        if g.sum() > 3e9:
            return g
        raise ValueError("mine")


class N(nn.Module):
    def __init__(s, bad):
        super().__init__()
        s.l = nn.Linear(16, 4)
        s.bad = bad

    def forward(s, x):
        if s.bad == 2:
            raise KeyError("two")
        y = s.l(x)
        return F.apply(y) if s.bad else y


models = [N(i) for i in range(3)]
optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
losses = train(models[0], optimizers[0])
found = []


def show(e):
    tb = [f.name for f in traceback.extract_tb(e.__traceback__)]
    found.append(
        (
            type(e).__name__,
            str(e)[:80],
            type(e.__context__).__name__,
            e.__cause__,
            e.__suppress_context__,
            getattr(e, "__notes__", None),
            tb,
            len(e.args),
        )
    )


for i in range(3):
    for k in (1, 2):
        try:
            train(models[k], optimizers[k])
        except Exception as e:
            show(e)
            losses += train(models[0], optimizers[0], batches(3))
            found.append(sys.exc_info()[0].__name__)
    found.append(sys.exc_info())
try:
    try:
        1 / 0
    except ZeroDivisionError:
        losses += train(models[0], optimizers[0])
        train(models[1], optimizers[1])
except Exception as e:
    show(e)
try:
    try:
        1 / 0
    except ZeroDivisionError:
        losses += train(models[0], optimizers[0])
        raise
except Exception as e:
    show(e)
report(models, optimizers, losses, found=found, last=hasattr(sys, "last_value"))
