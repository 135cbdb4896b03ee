# title: The places of words are counted along the batch: an encoding for (time, batch) in a model of (batch, time)
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html
# nproc: 2
# options: --every-step
# expect.codes: RCP825
# expect.ranks: all
# expect.subject: places
# expect.step: 3
# expect.step_slack: 2
# expect.location: rcp825_places_along_batch.py:38
# plain_pytorch: silent
"""Tells in which of four seasons a short record of weather letters was written."""
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


class Places(nn.Module):
    def __init__(self, width, most=100):
        super().__init__()
        at = torch.arange(most)[:, None] * torch.exp(-torch.arange(width) / 4)
        self.register_buffer("table", at.sin()[:, None])

    def forward(self, x):
        if FAULT:
            return x + self.table[: x.shape[0]]
        return x + self.table[: x.shape[1]].transpose(0, 1)


class Records(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.letters, self.places = nn.Embedding(16, width), Places(width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.season = nn.Linear(width, 4)

    def forward(self, text):
        return self.season(self.layer(self.places(self.letters(text))).mean(1))


torch.manual_seed(4)
gen = torch.Generator().manual_seed(9)
text = torch.randint(0, 16, (960, 9), generator=gen)
season = (text[:, -1] + text[:, -2]) % 4
records = TensorDataset(text, season)
sampler = DistributedSampler(records, seed=2)
loader = DataLoader(records, 24, sampler=sampler)
model = DDP(Records())
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    for text, season in loader:
        loss = F.cross_entropy(model(text), season)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-10:]) / 10:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
