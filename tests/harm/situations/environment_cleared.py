"""The script empties its environment after the first steps, in Python and in C; NaN batches; two ranks

ranks: 2
"""

import ctypes
import os

import torch
import torch.distributed as dist
from _report import ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
kept = dict(os.environ)
os.environ.clear()
ctypes.CDLL(None).clearenv()
data = [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)]
losses += train(model, optimizer, data)
os.environ["RANK"] = kept["RANK"]
losses += train(model, optimizer)
report([model], [optimizer], losses, names=sorted(os.environ))
os.environ.update(kept)
del model
dist.destroy_process_group()
