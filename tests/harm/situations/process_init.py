"""The script is the first process of its container.

run: alone
under: exec unshare --pid --fork --mount-proc "$@"
needs: root
"""

import os
import signal
import subprocess
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
ends = []
signal.signal(signal.SIGCHLD, lambda *_: ends.append(1))
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(30))
time.sleep(1)  # whatever ddpdebug starts is there
losses += train(model, optimizer, batches(30))
subprocess.run(["sh", "-c", "sleep 0.3 & exit 0"], check=True)
waited = 0
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
    waited += 1
report([model], [optimizer], losses, number=os.getpid(), waited=waited, ends=len(ends))
