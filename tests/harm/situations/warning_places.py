"""Warnings that torch attributes to its caller: line, and filters by module.

ranks: 1
"""

import warnings

import torch
from _report import batches, ddp, report, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

start()
model = ddp(nn.Linear(16, 4))
seen = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2).step(3)
    torch.nn.utils.clip_grad_norm_([torch.ones(2, requires_grad=True)], 1.0)
    loss = model(next(batches())).square().mean()
    loss.backward()
    optimizer.step()
    nn.functional.mse_loss(torch.ones(2), torch.ones(2, 1))
    warnings.warn("mine")
seen = [(w.category.__name__, w.filename.rpartition("/")[2], w.lineno) for w in caught]
warnings.filterwarnings("error", category=FutureWarning, module="__main__")
try:
    DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    raised = False
except FutureWarning:
    raised = True
report([model], [optimizer], [loss], seen=seen, raised=raised)
