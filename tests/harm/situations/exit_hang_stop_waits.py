"""--on-hang stop: ranks wait for one that is stopped or evaluates.

ranks: 2
env: DDPDEBUG_ON_HANG=stop
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
if os.environ["RANK"] == "1":
    helper = os.fork()
    if helper == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(3)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)
losses += train(model, optimizer, batches(seed=7))
if os.environ["RANK"] == "0":
    end = time.monotonic() + 15
    with torch.no_grad():
        while time.monotonic() < end:
            model.module(torch.ones(8, 16))
losses += train(model, optimizer, batches(seed=8))
report([model], [optimizer], losses)
del model
finish()
