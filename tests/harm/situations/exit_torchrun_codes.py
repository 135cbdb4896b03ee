"""Under torchrun rank 1 ends with exit code 3.

run: torchrun
ranks: 2
"""

import sys

import torch
from _report import ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
report([model], [optimizer], losses)
rank = torch.distributed.get_rank()
del model
finish()
sys.exit(3 * rank)
