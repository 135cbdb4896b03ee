"""HOME, TMPDIR and the user's name are missing or wrong; LANG=C.

run: alone
env: HOME=- TMPDIR=/nonexistent USER=- LOGNAME=- LANG=C LC_ALL=C PYTHONUTF8=0 TERM=-
"""

import locale
import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses, locale=[locale.getlocale(), sys.stdout.encoding, sys.stdout.errors])
