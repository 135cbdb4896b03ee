"""sys.stdout and sys.stderr replaced by objects that refuse most calls."""

import sys

import torch
from _report import ddp, report, start, train
from torch import nn


class Refuses:
    def write(self, text):
        raise RuntimeError("quiet please")


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
kept = sys.stdout, sys.stderr
sys.stdout = sys.stderr = Refuses()
losses = train(model, optimizer, [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)])
sys.stdout, sys.stderr = None, None
losses += train(model, optimizer)
sys.stdout, sys.stderr = kept
report([model], [optimizer], losses)
