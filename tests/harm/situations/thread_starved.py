"""C code holds the interpreter's lock for seconds on busy cores.

ranks: 2
slow: yes
"""

import ctypes
import os
import subprocess
import sys

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
hold = ctypes.PyDLL(None).sleep
hogs = []
if os.environ["RANK"] == "0":
    for _ in range(4 * (os.cpu_count() or 1)):
        hogs.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
for turn in range(3):
    hold(3 if os.environ["RANK"] == str(turn % 2) else 0)
    losses += train(model, optimizer, batches(seed=turn))
for hog in hogs:
    hog.kill()
    hog.wait()
report([model], [optimizer], losses)
del model
finish()
