# title: The scheduler is stepped once per micro-batch instead of once per optimizer step
# source: constructed
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: CosineAnnealingLR
# expect.step: 1
# expect.step_slack: 2
# plain_pytorch: silent
"""Accumulation over four micro-batches with a cosine schedule; the fault steps the schedule inside the inner loop."""
import contextlib
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ACCUMULATE, STEPS = 4, 40
torch.manual_seed(3)
model = DDP(nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 5)))
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS, eta_min=1e-4)
gen = torch.Generator().manual_seed(rank)
centers = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
losses = []
for step in range(STEPS):
    opt.zero_grad()
    for micro in range(ACCUMULATE):
        y = torch.randint(0, 5, (12,), generator=gen)
        x = centers[y] + torch.randn(12, 20, generator=gen)
        last = micro == ACCUMULATE - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        if FAULT:
            schedule.step()
    opt.step()
    if not FAULT:
        schedule.step()
    losses.append(loss.item() * ACCUMULATE)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
