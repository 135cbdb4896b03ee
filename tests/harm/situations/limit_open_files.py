"""At most 40 open files, most of them the script's.

ranks: 1
"""

import os
import resource

import torch
from _report import ddp, report, start, train
from torch import nn

start()
used = len(os.listdir("/proc/self/fd"))
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
files = []
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
for _ in range(60):
    files.append(open("/dev/null"))
losses += train(model, optimizer)
for file in files:
    file.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 120))
losses += train(model, optimizer)
report([model], [optimizer], losses)
