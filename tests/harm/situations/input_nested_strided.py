"""A nested tensor in the strided layout."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = [torch.nested.nested_tensor([x[:3], x[3:8]]) for x in batches()]
losses = train(model, optimizer, data, lambda out: sum(part.pow(2).mean() for part in out.unbind()))
report([model], [optimizer], losses)
