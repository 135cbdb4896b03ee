"""Ctrl-C in the middle of training, not caught.

run: alone
"""

import os
import signal

import torch
from _report import start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
print("trained", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
