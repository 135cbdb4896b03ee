# title: The loss is scaled, and optimizer.step() is called where scaler.step(optimizer) is meant
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Adam hides a constant factor of its gradients; nothing skips a step with infinities, and the scale never changes."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(35)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4)))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
gen, truth = torch.Generator().manual_seed(60 + rank), torch.randn(12, 4, generator=torch.Generator().manual_seed(6))
for step in range(30):
    x = torch.randn(20, 12, generator=gen)
    loss = F.cross_entropy(model(x), (x @ truth).argmax(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if FAULT:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
