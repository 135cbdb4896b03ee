# title: The validation loop leaves the model in eval mode: dropout and BatchNorm are off from then on
# source: constructed
# nproc: 2
# expect.codes: RCP804
# expect.ranks: all
# expect.subject: drop
# expect.step: 20
# plain_pytorch: silent
"""Keyword spotting on short waveforms; validation every 20 steps; the fault forgets to go back to train mode."""
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


class Spotter(nn.Module):
    def __init__(self, words=6):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 12, 9, stride=2)
        self.bn1 = nn.BatchNorm1d(12)
        self.conv2 = nn.Conv1d(12, 16, 7, stride=2)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(16, words)

    def forward(self, wave):
        h = F.relu(self.bn1(self.conv1(wave)))
        h = F.relu(self.conv2(h)).mean(-1)
        return self.out(self.dropout(h))


def waves(gen, n=24):
    word = torch.randint(0, 6, (n,), generator=gen)
    t = torch.linspace(0, 1, 160)
    tone = torch.sin(2 * torch.pi * (4 + 5 * word[:, None]) * t)
    return (tone + 0.5 * torch.randn(n, 160, generator=gen))[:, None], word


def validate(model, gen):
    model.eval()
    hits = 0
    with torch.no_grad():
        for _ in range(4):
            x, y = waves(gen)
            hits += (model(x).argmax(1) == y).sum().item()
    if not FAULT:
        model.train()
    return hits / 96


torch.manual_seed(5)
model = DDP(Spotter())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
train_gen = torch.Generator().manual_seed(10 + rank)
val_gen = torch.Generator().manual_seed(99 + rank)
losses = []
for it in range(60):
    x, y = waves(train_gen)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if it % 20 == 19:
        validate(model, val_gen)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
