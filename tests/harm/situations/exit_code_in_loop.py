"""sys.exit(5) inside of the training loop, under no_grad and inference mode."""

import atexit
import sys

import torch
from _report import report, start, train
from torch import nn

start()
atexit.register(print, "bye")
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
report([model], [optimizer], losses)
with torch.no_grad(), torch.inference_mode():
    sys.exit(5)
