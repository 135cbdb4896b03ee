"""stdout and stderr are pipes without a reader.

run: alone
under: "$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}
"""

import os
import signal
import sys
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
os.dup2(os.open("kept.txt", os.O_CREAT | os.O_WRONLY), 9)
os.write(1, b"\n" * 2)
time.sleep(0.5)
losses = train(model, optimizer, batches(20))
with os.fdopen(9, "w") as kept:
    sys.stdout, original = kept, sys.stdout
    report([model], [optimizer], losses, handler=signal.getsignal(signal.SIGPIPE).name)
os._exit(3)
