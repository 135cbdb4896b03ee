"""Rank 1 has another version of ddpdebug, whose rows are longer.

ranks: 2
"""

import os
import sys
import time

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
if os.environ["RANK"] == "1" and "ddpdebug.exchange.ticks" in sys.modules:
    sys.modules["ddpdebug.exchange.ticks"].ROW_BYTES += 8
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x in batches(60):
    losses += train(model, optimizer, [x])
    time.sleep(0.01)
report([model], [optimizer], losses)
