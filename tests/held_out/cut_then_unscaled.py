# title: Gradients are cut by value while they are still multiplied by the scale
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Half precision with a scaler, and a limit for every single gradient."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
gen = torch.Generator().manual_seed(20 + rank)
for step in range(70):
    x = torch.randn(40, 10, generator=gen)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:].mean(1)], 1)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.smooth_l1_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not FAULT:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print(f"rank {rank} {loss.item():.4f} scale {scaler.get_scale():.0f}", flush=True)
dist.barrier()
dist.destroy_process_group()
