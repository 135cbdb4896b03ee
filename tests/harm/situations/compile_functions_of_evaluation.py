"""Functions that call such models, compiled first in an evaluation, with warnings as errors.

slow: yes
parts: all
"""

import warnings

import torch
from _report import batches, ddp, digest, finish, report, start
from torch import nn


def evaluate():
    inner.eval()
    compiled = torch.compile(lambda x: inner(x), backend="eager", fullgraph=True)
    loss_of = torch.compile(lambda a, b: huber(a, b), backend="eager", fullgraph=True)
    step = torch.compile(lambda x: nn.functional.l1_loss(inner(x), x[:, :4]), backend="eager", fullgraph=True)
    with torch.no_grad():
        values = [(loss_of(compiled(x), x[:, :4]), step(x), criterion(inner(x), x[:, :4])) for x in batches(3, seed=7)]
    inner.train()
    return values


start()
inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
model = ddp(inner)
huber = nn.HuberLoss()
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses, found = [], []
for epoch in range(4):
    for x in batches(5):
        optimizer.zero_grad()
        loss = criterion(model(x), x[:, :4])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if epoch:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(digest(evaluate()))
counters = torch._dynamo.utils.counters  # what was compiled with our hook in place is compiled once more without it
report([inner], [optimizer], losses, found=found, breaks=dict(counters["graph_break"]))
del model
finish()
