"""Evaluation under inference mode between the steps and inside a forward."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4)))
with torch.inference_mode():
    teacher = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters())
losses = []
for x in batches():
    losses += train(model, optimizer, [x])
    model.eval()
    with torch.inference_mode():
        losses += [model(x).mean(), teacher(x).mean()]
    model.train()
report([model, teacher], [optimizer], losses)
