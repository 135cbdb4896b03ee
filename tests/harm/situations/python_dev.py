"""python -X dev: unclosed resources and default warnings are shown.

run: alone
python: -X dev -W ignore::DeprecationWarning
env: OMP_NUM_THREADS=1
"""

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses)
