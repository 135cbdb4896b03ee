"""The script replaces itself by a new interpreter (execv) in the middle of training.

run: alone
"""

import os
import sys

import torch
from _report import report, start, train
from torch import nn

start()
second = os.environ.get("SECOND_LIFE")
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
report([model], [optimizer], losses, life=2 if second else 1)
sys.stdout.flush()
if not second:
    os.environ["SECOND_LIFE"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.exit(17)
