"""torchrun --max-restarts 1: rank 1 raises in the first attempt, the second trains to the end.

run: torchrun
ranks: 2
torchrun: --max-restarts=1 --monitor-interval=0.1
timeout: 150
"""

import os
import time

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("first attempt")
    time.sleep(60)
losses += train(model, optimizer, batches(30))
report([model], [optimizer], losses, attempt=os.environ["TORCHELASTIC_RESTART_COUNT"])
del model
finish()
