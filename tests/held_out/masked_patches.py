# title: Every rank seeds alike, so the masks of all ranks hide the same patches in every step
# source: constructed
# nproc: 2
# expect.codes: RANK110
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 20
# plain_pytorch: silent
"""Masked patches of pictures are filled in; the masks are drawn in the training loop."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT") == "1"


class Waves(Dataset):
    def __init__(self):
        gen = torch.Generator().manual_seed(0)
        self.patches = torch.sin(torch.rand(960, 1, 8, generator=gen) * 3 + torch.arange(9.0)[None, :, None] * 0.4)

    def __len__(self):
        return len(self.patches)

    def __getitem__(self, i):
        return {"patches": self.patches[i], "id": i}


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.blank = nn.Parameter(torch.zeros(8))
        self.mix = nn.Sequential(nn.Flatten(), nn.Linear(72, 96), nn.GELU(), nn.Linear(96, 72), nn.Unflatten(1, (9, 8)))

    def forward(self, patches, hidden):
        return self.mix(torch.where(hidden[..., None], self.blank, patches))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)
model = nn.parallel.DistributedDataParallel(Filler())
if not FAULT:
    torch.manual_seed(1234 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = Waves()
sampler = DistributedSampler(data, world, rank, shuffle=True)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch in DataLoader(data, 32, sampler=sampler):
        hidden = torch.rand(len(batch["id"]), 9) < 0.5
        again = model(batch["patches"], hidden)
        loss = F.mse_loss(again[hidden], batch["patches"][hidden])
        opt.zero_grad()
        loss.backward()
        opt.step()
print(f"rank {rank} loss {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
