# title: Batches that a resumed epoch had behind it are skipped in every later epoch as well
# source: https://github.com/allenai/open-instruct/issues/681
# nproc: 2
# expect.codes: DATA911
# expect.ranks: all
# expect.subject: DataLoader
# expect.step: 12
# expect.step_slack: 1
# expect.location: data911_skipped_in_every_epoch.py:53
# plain_pytorch: silent
"""Yield of wheat by eight measures of soil and weather; the run goes on behind six batches of its third epoch."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

gen = torch.Generator().manual_seed(8)
measures = torch.randn(480, 8, generator=gen)
weights = torch.randn(8, 1, generator=gen)
yields = (measures @ weights).tanh() + 0.2 * measures[:, :1] * measures[:, 1:2]
fields = TensorDataset(measures, yields)
sampler = DistributedSampler(fields, seed=4)
loader = DataLoader(fields, batch_size=20, sampler=sampler)


class Yield(nn.Module):
    def __init__(self):
        super().__init__()
        self.soil, self.weather, self.out = nn.Linear(5, 24), nn.Linear(3, 24), nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.soil(x[:, :5]).tanh() * self.weather(x[:, 5:]).sigmoid())


torch.manual_seed(5)
model = DDP(Yield())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
behind = 6
losses = []
for epoch in range(2, 8):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i < behind:
            continue
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    if not FAULT:
        behind = 0
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
