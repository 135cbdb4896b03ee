# title: zero_grad stands in the micro-batch loop: the step uses the last micro-batch only
# source: constructed
# nproc: 2
# expect.codes: RCP816
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Accumulation for a ranking model; the fault clears before each backward."""
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
K = 4
torch.manual_seed(16)
model = DDP(nn.Sequential(nn.Linear(14, 28), nn.ReLU(), nn.Linear(28, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(20 + rank)
taste = torch.randn(14, generator=torch.Generator().manual_seed(8))
losses = []
for _ in range(40):
    if not FAULT:
        opt.zero_grad()
    for k in range(K):
        if FAULT:
            opt.zero_grad()
        a, b = torch.randn(2, 16, 14, generator=gen)
        better = torch.where(a @ taste > b @ taste, 1.0, -1.0)
        with contextlib.nullcontext() if k == K - 1 else model.no_sync():
            scores = model(torch.cat([a, b]))[:, 0]
            loss = F.margin_ranking_loss(scores[:16], scores[16:], better, margin=0.5) / K
            loss.backward()
    opt.step()
    losses.append(loss.item() * K)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
