"""SIGTERM without a handler, in the middle of training."""

import os
import signal

import torch
from _report import batches, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer, batches(150))
print("trained", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
train(model, optimizer, batches(1000))
print("not reached")
