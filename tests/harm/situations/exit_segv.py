"""A segmentation fault of the script, with its own faulthandler."""

import ctypes
import faulthandler
import os
import sys

import torch
from _report import batches, start, train
from torch import nn

fault = open(os.devnull, "w")
faulthandler.enable(fault)
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
train(model, optimizer, batches(150))
print("trained", faulthandler.is_enabled(), flush=True)
sys.stdout.flush()
ctypes.string_at(0)
