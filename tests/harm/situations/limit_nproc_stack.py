"""Small stacks, no core files, few locked pages, a low priority ceiling.

slow: yes
"""

import resource
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(20))
for k, v in (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_STACK, 1 << 20),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_NICE, 0),
    (resource.RLIMIT_SIGPENDING, 1),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_DATA, 8 << 30),
):
    resource.setrlimit(k, (v, v))
losses += train(model, optimizer, batches(40))
time.sleep(1.1)
losses += train(model, optimizer, batches(40))
report([model], [optimizer], losses, n=resource.getrlimit(resource.RLIMIT_STACK))
