"""Losses that are scaled before backward and gradients that are not scaled any more at the step: by whom is asked for.

Prints the true norm of the gradients of each step, without the scale and before clipping. All ranks have the same data,
so that this is also the norm of a rank's own gradients.
"""

import sys

import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

KIND, FACTOR = sys.argv[1], 1024.0
setup()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3, enabled=KIND in {"float16", "bfloat16"})
losses, norms = [], []
for x, y in batches(0, 14, 8, 16, classes=5):
    optimizer.zero_grad()
    with torch.autocast("cpu", getattr(torch, KIND, torch.bfloat16), enabled=KIND in {"float16", "bfloat16"}):
        loss = nn.functional.cross_entropy(ddp(x).float(), y)
    if KIND == "weighted":  # an objective of its own: nobody divides the gradients
        loss = loss * 8
    if KIND == "own":
        (loss * FACTOR).backward()
        for p in model.parameters():
            p.grad.div_(FACTOR)
    elif KIND == "weighted":
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    norms.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)))
    if KIND in {"own", "weighted"}:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.detach())
report([model], [optimizer], losses, norms=norms, scale=scaler.get_scale())
del ddp
finish()
