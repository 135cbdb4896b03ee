"""Files at fixed descriptors (dup2), written on, and handed to a child."""

import os
import subprocess
import sys

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(30))
mine = os.open("mine.log", os.O_CREAT | os.O_RDWR)
for number in range(20, 60):
    os.dup2(mine, number, inheritable=True)
for number in range(20, 60):
    losses += train(model, optimizer, batches(2))
    os.write(number, b"line\n")
code = "import os; print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(20, 60)))"
child = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
for number in range(20, 60):
    os.close(number)
losses += train(model, optimizer, batches(30))
report([model], [optimizer], losses, size=os.fstat(mine).st_size, child=child.stdout.strip())
