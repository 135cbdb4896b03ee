"""Rank 1 ends its loop early; rank 0 goes on without the group.

ranks: 2
"""

import os

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
if os.environ["RANK"] == "0":
    single = model.module
    losses += train(single, optimizer, batches(20))
report([model.module], [optimizer], losses)
