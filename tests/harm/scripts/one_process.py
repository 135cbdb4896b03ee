"""No process group at all."""

import random

import numpy as np
import torch
from common import batches, report
from torch import nn

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for x in batches(0, 5, 4, 8):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses)
