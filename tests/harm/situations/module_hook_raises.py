"""A hook raises in a forward, a backward and a step, and is caught."""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses, caught = [], []


def angry(*args):
    raise LookupError("mine")


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())


data = list(batches(12))
for number, x in enumerate(data):
    handle = None
    if number in (2, 3):
        handle = model.module[2].register_forward_hook(angry)
    if number in (4, 5):
        handle = optimizer.register_step_pre_hook(angry)
    if number == 6:
        handle = nn.modules.module.register_module_forward_pre_hook(angry)
    try:
        step(x)
    except LookupError as error:
        caught.append((number, str(error)))
    if handle is not None:
        handle.remove()
report([model], [optimizer], losses, caught=caught)
