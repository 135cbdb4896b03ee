# title: The functional dropout is called without training=, whose default is True
# source: constructed
# nproc: 2
# expect.codes: RCP820
# expect.ranks: all
# expect.subject: encoder.1
# expect.step: 20
# expect.step_slack: 1
# expect.location: rcp820_functional_dropout_by_default.py:37
# plain_pytorch: silent
"""A residual encoder for gait phases; model.eval() does not reach the dropout of its blocks."""
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
    def __init__(self, width, p=0.2):
        super().__init__()
        self.norm, self.p = nn.LayerNorm(width), p
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = F.gelu(self.wide(self.norm(x)))
        if FAULT:
            h = F.dropout(h, self.p)
        else:
            h = F.dropout(h, self.p, training=self.training)
        return x + self.narrow(h)


class Gait(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(18, 32), Residual(32), nn.Linear(32, 4))

    def forward(self, x):
        return self.encoder(x)


def strides(gen, n=32):
    phase = torch.randint(0, 4, (n,), generator=gen)
    angle = (phase[:, None] + torch.rand(n, 1, generator=gen)) * torch.pi / 2
    waves = torch.arange(1, 10) * angle
    return torch.cat([waves.sin(), waves.cos()], 1) + 0.3 * torch.randn(n, 18, generator=gen), phase


torch.manual_seed(11)
model = DDP(Gait())
torch.manual_seed(1100 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(60 + rank)
held_out = [strides(torch.Generator().manual_seed(900 + i)) for i in range(4)]
losses = []
for epoch in range(3):
    model.train()
    for _ in range(20):
        x, phase = strides(gen)
        loss = F.cross_entropy(model(x), phase)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        accuracy = sum((model(x).argmax(1) == phase).float().mean().item() for x, phase in held_out) / len(held_out)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
