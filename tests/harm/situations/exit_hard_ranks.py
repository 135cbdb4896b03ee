"""os._exit(0) on all ranks, seconds apart, with unflushed output.

ranks: 2
slow: yes
"""

import os
import time

import torch
from _report import ddp, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
print("trained", len(losses), flush=True)
time.sleep(3.0 + 4.0 * int(os.environ["RANK"]))
print("lost")
os._exit(0)
