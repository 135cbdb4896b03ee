"""Address space of 1 GiB more than in use.

ranks: 1
"""

import resource

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
held = torch.ones(700 * 2**18)
losses += train(model, optimizer, batches(20))
try:
    torch.ones(2**29)
    caught = "no"
except RuntimeError as error:
    caught = "can't allocate memory" in str(error)
losses += train(model, optimizer)
report([model], [optimizer], losses, caught=caught, held=held.sum().item())
