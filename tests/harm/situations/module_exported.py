"""A trained model is traced, scripted, exported, and trains on."""

import io
import warnings

import torch
import torch.nn.functional as F
from _report import batches, report, start, train
from torch import nn


def helper(x):
    return F.relu(x) * 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return helper(F.gelu(self.layer(x))) + x.sum()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        return self.inner(x)


start()
for model in (Net(), Own()):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = train(model, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = torch.randn(2, 16)
        traced, scripted = torch.jit.trace(model, x), torch.jit.script(model)
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        followed = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,))
    print(traced.graph, scripted.code, followed.code, exported.graph, sep="\n")
    print(sorted({f"{warning.category.__name__} {warning.filename} {warning.lineno}" for warning in said}))
    outputs = [one(x) for one in (model, traced, scripted, followed, exported.module())]
    print([bool((output == outputs[0]).all()) for output in outputs])
    losses += train(model, optimizer, batches(count=3))
    report([model], [optimizer], losses)
