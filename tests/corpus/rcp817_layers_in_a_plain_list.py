# title: The layers sit in a plain list: they are neither trained nor synchronised
# source: constructed
# nproc: 2
# expect.codes: RCP817
# expect.ranks: all
# expect.subject: blocks[0]
# expect.step: 1
# expect.step_slack: 1
# plain_pytorch: silent
"""Residual blocks over a set of measurements; the fault forgets nn.ModuleList."""
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


class Residual(nn.Module):
    def __init__(self, width=20, depth=3):
        super().__init__()
        self.stem = nn.Linear(7, width)
        blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.blocks = blocks if FAULT else nn.ModuleList(blocks)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h).squeeze(-1)


torch.manual_seed(19)
model = DDP(Residual())
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(44 + rank)
losses = []
for _ in range(50):
    x = torch.randn(28, 7, generator=gen)
    y = (x[:, 0] * x[:, 1]).tanh() + x[:, 2]
    loss = F.huber_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
