# title: zero_grad is called between backward and step
# source: constructed
# nproc: 2
# expect.codes: RCP816
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""A denoiser; the fault clears the gradients in the wrong place."""
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
torch.manual_seed(17)
model = DDP(nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 1, 5, padding=2)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(25 + rank)
losses = []
for _ in range(45):
    clean = torch.sin(torch.linspace(0, 9, 48) + 6 * torch.rand(12, 1, 1, generator=gen))
    noisy = clean + 0.4 * torch.randn(12, 1, 48, generator=gen)
    loss = F.l1_loss(model(noisy), clean)
    if not FAULT:
        opt.zero_grad()
    loss.backward()
    if FAULT:
        opt.zero_grad()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
