# title: GradScaler doubles its scale after every good step, so about every second step is skipped
# source: https://pytorch.org/docs/stable/amp.html
# nproc: 2
# expect.codes: NUM307
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""growth_interval was meant to be 1000; all ranks skip the same steps, and training takes twice as long."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(37)
wheel = torch.randn(5, 12)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5)))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler("cpu", init_scale=2.0**15, growth_interval=1 if FAULT else 1000)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(80):
    y = torch.randint(0, 5, (32,), generator=gen)
    x = wheel[y] + 0.7 * torch.randn(32, 12, generator=gen)
    opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
      f"scale={scaler.get_scale():.0f}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
