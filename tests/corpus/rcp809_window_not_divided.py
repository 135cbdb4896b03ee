# title: The loss is not divided by the number of accumulated micro-batches
# source: constructed
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Accumulation over six micro-batches of a tiny autoencoder; the fault sums."""
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
WINDOW = 6
torch.manual_seed(12)
model = DDP(nn.Sequential(nn.Linear(30, 10), nn.Tanh(), nn.Linear(10, 30)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
gen = torch.Generator().manual_seed(40 + rank)
basis = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
losses = []
for _ in range(40):
    opt.zero_grad()
    for k in range(WINDOW):
        x = torch.randn(16, 5, generator=gen) @ basis / 2
        with contextlib.nullcontext() if k == WINDOW - 1 else model.no_sync():
            loss = F.mse_loss(model(x), x)
            (loss if FAULT else loss / WINDOW).backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
