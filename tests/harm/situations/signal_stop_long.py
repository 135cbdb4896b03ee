"""SIGSTOP and SIGCONT 20 seconds later in one rank, 8 seconds later in the other.

ranks: 2
slow: yes
"""

import os
import signal
import time

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
for rank, seconds in (("1", 20.0), ("0", 8.0)):
    if os.environ["RANK"] == rank:
        helper = os.fork()
        if helper == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.waitpid(helper, 0)
    losses += train(model, optimizer, batches(seed=7))
report([model], [optimizer], losses)
del model
finish()
