"""--on-hang stop: one rank ends seconds before the other, and one raises.

ranks: 2
env: DDPDEBUG_ON_HANG=stop
slow: yes
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from _report import ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
report([model], [optimizer], losses)
del model
dist.barrier()
sys.stdout.flush()
if os.environ["RANK"] == "1":
    time.sleep(6)
    raise ValueError("a bad batch")
sys.exit(0)
