"""Evaluations, exceptions, closures, new optimizers, loads and skips between watched steps.

ranks: 2
"""

import sys

import torch
from _report import batches, ddp as wrap, finish, report, start
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))

    def forward(self, x):
        if x.shape[1] != 16:
            raise ValueError("wide")
        if len(losses) % 100 == 99:
            depth, frame = 0, sys._getframe()
            while frame is not None and frame.f_globals.get("__name__") != "__main__":
                depth, frame = depth + 1, frame.f_back
            depths.append(depth)
        return self.body(x)


start()
losses, depths, refused = [], [], 0
ddp = wrap(Net())
optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=50)
hooked = []
ddp.module.body[0].register_forward_hook(lambda *_: hooked.append(1))
for number, x in enumerate(batches(400)):
    if number % 97 == 96:
        ddp.eval()
        with torch.no_grad():
            losses.append(ddp.module(x).square().mean())
        ddp.train()
    if number in {200, 300}:
        ddp.module.load_state_dict({name: value.clone() for name, value in ddp.module.state_dict().items()})
    if number == 250:
        optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    if number % 111 == 110:
        try:
            ddp(x[:, :3])
        except ValueError:
            refused += 1

    def loss_of(x=x):
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        loss.backward()
        return loss

    if number % 50 == 49:
        losses.append(optimizer.step(loss_of).detach())
    elif number % 10 == 9:
        with ddp.no_sync():
            ddp(x).mean().backward()
        losses.append(loss_of().detach())
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
    else:
        optimizer.zero_grad()
        loss = ddp(x * (float("inf") if number % 120 == 119 else 1.0)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(torch.nan_to_num(loss.detach()))
print(refused, len(hooked), depths, scaler.get_scale())
report([ddp], [optimizer], losses)
del ddp, optimizer, loss_of
finish()
