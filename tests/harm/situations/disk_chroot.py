"""chroot into an empty directory in the middle of training.

needs: root
"""

import os
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
os.mkdir("jail")
os.chroot("jail")
os.chdir("/")
losses += train(model, optimizer, batches(60))
time.sleep(1.5)
bad = torch.full((8, 16), float("nan"))  # for which a bundle is written
optimizer.zero_grad()
model(bad).square().mean().backward()
optimizer.zero_grad()
losses += train(model, optimizer, batches(6))
report([model], [optimizer], losses, inside=list(os.walk("/")))
