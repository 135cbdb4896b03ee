"""A umask that forbids everything; priorities, affinity and groups change."""

import os
import resource

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(5))
os.umask(0o777)
modes, masks = set(), set()
os.nice(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in range(40):
    losses += train(model, optimizer, batches(1, seed=number))
    os.close(os.open(f"file{number}", os.O_CREAT | os.O_WRONLY, 0o666))
    modes.add(oct(os.stat(f"file{number}").st_mode))
    mask = os.umask(0o777)
    masks.add(oct(mask))
os.umask(0o022)
report([model], [optimizer], losses, modes=modes, masks=masks, nice=os.nice(0), cpus=len(os.sched_getaffinity(0)))
