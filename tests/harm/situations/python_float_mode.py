"""Flush-denormal and the processor's rounding mode hold in hooks and after steps.

slow: yes
"""

import ctypes

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(20))
libm = ctypes.CDLL("libm.so.6")
libm.fesetround(0x800)
torch.set_flush_denormal(True)
losses += train(model, optimizer, batches(40))
print(libm.fegetround(), torch.tensor(1e-310, dtype=torch.float64).mul(1).item(), 1e300 * 1.1e-9)
report([model], [optimizer], losses)
