# title: A power below one is taken of pixels that were cut at zero, where its slope has no limit
# source: constructed
# nproc: 2
# expect.codes: NUM303
# expect.ranks: all
# expect.subject: any
# expect.module: curve
# expect.op: pow
# expect.step: 0
# expect.location: tone_curve.py:29
# plain_pytorch: silent
"""Brightness of photographs is corrected by a small net and a learned tone curve."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class ToneCurve(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((3, 1, 1), 0.6))

    def forward(self, pixels):
        low = 0.0 if FAULT else 1e-3
        return pixels.clamp(min=low).pow(self.gamma)


class Corrector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.curve = ToneCurve()
        with torch.no_grad():
            nn.init.dirac_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

    def forward(self, photo):
        return self.curve(self.conv(photo))


def photos(gen):
    photo = torch.rand(8, 3, 10, 10, generator=gen)
    photo = (photo - 0.15).clamp(min=0)
    return photo, (photo + 0.02) ** 0.8


dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(Corrector())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(rank)
for step in range(40):
    photo, target = photos(gen)
    loss = nn.functional.mse_loss(model(photo), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.5f}", flush=True)
dist.barrier()
dist.destroy_process_group()
