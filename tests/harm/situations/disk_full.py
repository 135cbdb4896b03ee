"""A file system of 440 MiB, nearly full, with bad samples; two ranks.

ranks: 2
needs: root
slow: yes
"""

import os
import subprocess

import torch
import torch.distributed as dist
from _report import ddp, group, report, start
from torch import nn

start()
rank = group()
if rank == 0:
    os.mkdir("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=440m", "tmpfs", "small"], check=True)
dist.barrier()
start_folder = os.getcwd()
os.chdir("small")
try:
    model = ddp(nn.Linear(4000, 4000))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    losses = []
    for step in range(10):
        x = torch.ones(2, 4000)
        if step in (3, 4, 5, 6):
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0)
        optimizer.step()
        losses.append(loss.detach())
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "first.pt")
        torch.save([t.clone() for t in model.module.state_dict().values()] + [torch.zeros(45_000_000)], "second.pt")
        print("sizes", [os.path.getsize(f"{name}.pt") for name in ("first", "second")])
    dist.barrier()
    report([model], [optimizer], losses)
finally:
    os.chdir(start_folder)
    if rank == 0:
        subprocess.run(["umount", "-l", "small"], check=True)
