"""The script changes its working directory and empties the one it was started in.

watched: no, the script deletes the run directory
"""

import os
import shutil
import tempfile

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
first = os.getcwd()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
with tempfile.TemporaryDirectory() as other:
    os.chdir(other)
    for entry in os.listdir(first):
        shutil.rmtree(os.path.join(first, entry), ignore_errors=True)
    losses += train(model, optimizer, batches(30))
    seen = os.listdir(other)
    os.chdir(first)
report([model], [optimizer], losses, seen=seen)
