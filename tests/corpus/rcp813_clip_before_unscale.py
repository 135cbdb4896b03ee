# title: Gradients are clipped while they carry the loss scale
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Mixed precision with clipping; the fault forgets scaler.unscale_."""
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
torch.manual_seed(13)
model = DDP(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4)))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
gen = torch.Generator().manual_seed(rank)
w = torch.randn(16, 4, generator=torch.Generator().manual_seed(6))
losses = []
for _ in range(50):
    x = torch.randn(24, 16, generator=gen)
    y = (x @ w).argmax(1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    if not FAULT:
        scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
