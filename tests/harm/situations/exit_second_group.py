"""The group is destroyed and made again twice, on the same port, with a DDP each time.

ranks: 2
"""

import torch
from _report import ddp, finish, report, start, train
from torch import nn

start()
losses = []
for _ in range(3):
    model = ddp(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses += train(model, optimizer)
    inner = model.module
    del model
    finish()
report([inner], [optimizer], losses)
