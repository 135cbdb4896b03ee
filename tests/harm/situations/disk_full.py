"""A file system of 24 MiB that is nearly full, and the script's checkpoint just fits; bad samples on the way.

ranks: 1
needs: root
"""

import os
import subprocess

import torch
from _report import ddp, finish, report, start
from torch import nn

start()
os.mkdir("small")
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", "small"], check=True)
os.chdir("small")
try:
    model = ddp(nn.Linear(1000, 1000))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    losses = []
    for step in range(10):
        x = torch.ones(2, 1000)
        if step in (3, 4, 5, 6):
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0)
        optimizer.step()
        losses.append(loss.detach())
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "first.pt")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "second.pt")
    report([model], [optimizer], losses, sizes=[os.path.getsize(f"{name}.pt") for name in ("first", "second")])
finally:
    os.chdir("..")
    subprocess.run(["umount", "-l", "small"], check=True)
