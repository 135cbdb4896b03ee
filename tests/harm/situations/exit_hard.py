"""os._exit(9) in the middle of training, with unflushed output."""

import os

import torch
from _report import batches, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
print("first", flush=True)
losses = train(model, optimizer, batches(150))
print("lost")
os._exit(9)
