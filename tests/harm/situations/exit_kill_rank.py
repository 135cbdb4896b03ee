"""kill -9 of rank 1; rank 0 gets an exception and ends with its own code.

ranks: 2
"""

import os
import signal
import sys

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
report([model], [optimizer], losses)
sys.stdout.flush()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    train(model, optimizer, batches(200))
except RuntimeError as error:
    print("lost the peer", flush=True)
    sys.exit(6)
