# title: Accumulation, warm-up, cosine, mixed precision with unscale and clipping, all in the right order
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A large batch by accumulation with everything that goes with it."""
import contextlib
import math
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ACCUMULATE, STEPS, WARMUP = 4, 40, 5
torch.manual_seed(31)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 6)))
opt = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.02)


def factor(n):
    return n / WARMUP if n < WARMUP else 0.5 * (1 + math.cos(math.pi * (n - WARMUP) / (STEPS - WARMUP)))


schedule = torch.optim.lr_scheduler.LambdaLR(opt, factor)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10)
gen = torch.Generator().manual_seed(rank)
middle = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(STEPS):
    opt.zero_grad()
    for k in range(ACCUMULATE):
        y = torch.randint(0, 6, (16,), generator=gen)
        x = middle[y] + torch.randn(16, 16, generator=gen)
        with contextlib.nullcontext() if k == ACCUMULATE - 1 else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    schedule.step()
    losses.append(loss.item() * ACCUMULATE)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
