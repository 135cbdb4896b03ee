# title: A layer computes differently on one rank, so the shared validation batch gives another loss there
# source: constructed
# nproc: 3
# expect.codes: RANK107
# expect.ranks: 2
# expect.subject: any
# expect.step: 0
# expect.step_slack: 10
# plain_pytorch: silent
"""Same weights and same validation batch on all ranks; rank 2 falls back to a layer with a coarser epsilon."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def fused_kernels_available(rank):
    """Stands for a check of the machine: the third one lacks the kernel library."""
    return not (FAULT and rank == 2)


def build(rank):
    eps = 1e-6 if fused_kernels_available(rank) else 0.3
    return nn.Sequential(nn.Linear(10, 40), RMSNorm(40, eps), nn.GELU(), nn.Linear(40, 40), RMSNorm(40, eps),
                         nn.GELU(), nn.Linear(40, 1))


def target(x):
    return torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(30)
model = DDP(build(rank))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.MSELoss()
gen = torch.Generator().manual_seed(444 + rank)
val_x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))     # every rank scores the same rows
losses = []
for step in range(60):
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            val = criterion(model(val_x), target(val_x)).item()
        model.train()
        print(f"rank {rank} step {step} val {val:.6f}", flush=True)
    x = torch.randn(48, 10, generator=gen)
    loss = criterion(model(x), target(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())

crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
