"""`mock.patch.dict(sys.modules)` around parts of the training: what is loaded inside is forgotten; NaN; two ranks

ranks: 2
"""

import sys
from unittest import mock

import torch
import torch.distributed as dist
from _report import ddp, report, start, train
from torch import nn

start()
data = [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)]
with mock.patch.dict(sys.modules):
    model = ddp(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = train(model, optimizer)
with mock.patch.dict(sys.modules):
    losses += train(model, optimizer, data)
losses += train(model, optimizer)
report([model], [optimizer], losses)
del model
dist.destroy_process_group()
