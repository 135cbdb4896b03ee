"""Both ranks raise in the same step, inside `no_sync`, the group still there.

ranks: 2
"""

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
report([model], [optimizer], losses)
with model.no_sync():
    for x in batches():
        model(x).square().mean().backward()
        raise OverflowError("both of us")
