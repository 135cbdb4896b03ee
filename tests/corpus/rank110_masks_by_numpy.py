# title: numpy has one seed on all ranks, so that the hidden patches of different pictures are the same
# source: constructed
# nproc: 2
# expect.codes: RANK110
# expect.ranks: all
# expect.subject: numpy
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Filling in hidden patches; torch is seeded by rank for the dropout, numpy draws the masks."""
import os
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
PATCHES = 12
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(31)
model = DDP(nn.Sequential(nn.Linear(2 * PATCHES, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, PATCHES)))
torch.manual_seed(31 + rank)
np.random.seed(31 if FAULT else 31 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
shard = torch.Generator().manual_seed(100 + rank)
basis = torch.randn(4, PATCHES, generator=torch.Generator().manual_seed(1))


def hide(pictures):
    hidden = np.zeros(pictures.shape, dtype=np.float32)
    for row in hidden:
        row[np.random.permutation(PATCHES)[: PATCHES // 2]] = 1.0
    hidden *= np.random.rand(*hidden.shape) > 0.1
    return torch.from_numpy(hidden)


losses = []
for _ in range(60):
    pictures = torch.randn(16, 4, generator=shard) @ basis
    hidden = hide(pictures)
    filled = model(torch.cat([pictures * (1 - hidden), hidden], 1))
    loss = ((filled - pictures).square() * hidden).sum() / hidden.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
