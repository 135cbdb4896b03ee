# title: All ranks have one seed and draw the image size, the layers left out and the rows of their own shards from it
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Every draw of the loop is alike on all ranks on purpose, or does not matter: which rows of its own shard a rank takes."""
import os
import random
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x, kept):
        x = self.stem(x).relu()
        for block, keep in zip(self.blocks, kept):
            x = x + keep * block(x).relu()
        return self.head(x.mean((2, 3)))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(6)
torch.manual_seed(6)
model = DDP(Blocks())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
own = torch.Generator().manual_seed(60 + rank)
labels = torch.randint(0, 3, (256,), generator=own)
images = torch.randn(256, 1, 12, 12, generator=own) + labels.view(-1, 1, 1, 1)
losses = []
for _ in range(60):
    size = random.choice([8, 10, 12])
    kept = (torch.rand(4) > 0.2).float()
    rows = torch.randint(0, len(images), (24,))
    x, y = F.interpolate(images[rows], size=size), labels[rows]
    loss = F.cross_entropy(model(x, kept), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
