"""Schedulers before the step: the warning about the order, and its line."""

import torch
from _report import ddp, batches, report, start
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
losses = []
for early in (True, False):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x in batches(4):
        if early:
            scheduler.step()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if not early:
            scheduler.step()
        losses.append(loss.detach())
report([model], [optimizer], losses, wrapped=hasattr(optimizer.step, "__wrapped__"), rate=scheduler.get_last_lr())
