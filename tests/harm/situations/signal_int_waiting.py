"""Ctrl-C on a rank that waits in a collective for one that sleeps twelve seconds.

ranks: 2
slow: yes
"""

import os
import signal
import time

import torch
from _report import batches, ddp, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
if os.environ["RANK"] == "0":
    helper = os.fork()
    if helper == 0:
        time.sleep(1.5)
        os.kill(os.getppid(), signal.SIGINT)
        os._exit(0)
else:
    time.sleep(12.0)
try:
    losses += train(model, optimizer, batches(seed=7))
except KeyboardInterrupt:
    print("interrupted", flush=True)
except RuntimeError:
    print("the other one has left", flush=True)
else:
    print("went on", flush=True)
if os.environ["RANK"] == "0":
    os.waitpid(helper, 0)
os._exit(3)
