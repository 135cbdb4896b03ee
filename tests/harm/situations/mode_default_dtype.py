"""Default dtype float64 and default device meta while training goes on."""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
torch.set_default_dtype(torch.float64)
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters())
losses = []
data = [x.double() for x in batches()]
torch.set_default_device("meta")
for x in data:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.set_default_device("cpu")
report([model], [optimizer], losses)
