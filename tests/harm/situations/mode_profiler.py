"""torch's profiler lists the script's operations only."""

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.profiler import profile

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters())
with profile() as profiler:
    losses = train(model, optimizer)
seen = {event.key: event.count for event in profiler.key_averages()}
report([model], [optimizer], losses, products=seen["aten::addmm"], steps=seen["Optimizer.step#Adam.step"])
