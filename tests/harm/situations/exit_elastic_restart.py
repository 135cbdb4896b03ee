"""torchrun --max-restarts 1: rank 1 raises in the first attempt.

run: torchrun
ranks: 2
torchrun: --max-restarts=1 --monitor-interval=0.1
parts: all
"""

import os
import time

import torch
import torch.distributed as dist
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
# torch finds gloo's addresses of the first attempt in the launcher's store and may try them: other names avoid that
dist.distributed_c10d._world.group_count = 1000 * int(attempt)
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
if attempt == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("first attempt")
    time.sleep(60)
for x in batches(30):
    losses += train(model, optimizer, [x])
    time.sleep(0.05)
report([model], [optimizer], losses, attempt=attempt)
del model
finish()
