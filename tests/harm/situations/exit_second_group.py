"""The group is destroyed and made again twice, on the same port, with a DDP each time.

ranks: 2
"""

import os
import time

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
    time.sleep(0.5 * int(os.environ["RANK"]))  # the new store must listen before another rank finds the old one
report([inner], [optimizer], losses)
