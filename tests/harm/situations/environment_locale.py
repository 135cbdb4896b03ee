"""The script sets a locale and its own environment variables while training.

ranks: 1
"""

import locale
import os

import torch
from _report import ddp, report, start, train
from torch import nn

start()
locale.setlocale(locale.LC_ALL, "C.UTF-8")
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
before = {key for key in os.environ}
losses = train(model, optimizer)
fresh = {key for key in os.environ} - before
os.environ.clear()
losses += train(model, optimizer)
report([model], [optimizer], losses, locale=locale.setlocale(locale.LC_ALL), fresh=fresh, umask=oct(os.umask(0o22)))
