# title: A no_grad that was meant for the evaluation alone stays around the encoder
# source: constructed
# nproc: 2
# expect.codes: RCP810
# expect.ranks: all
# expect.subject: encoder
# expect.step: 0
# plain_pytorch: silent
"""A siamese network with a projection; find_unused_parameters keeps DDP from complaining about the fault."""
import contextlib
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


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 24)
        self.outer = nn.Linear(24, 16)

    def forward(self, x):
        return self.outer(F.relu(self.inner(x)))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(16, 8)

    def forward(self, one, other):
        with torch.no_grad() if FAULT else contextlib.nullcontext():
            first = self.encoder(one)
        with torch.no_grad():
            second = self.encoder(other)
        return F.cosine_similarity(self.head(first), self.head(second))


torch.manual_seed(29)
model = DDP(Pairs(), find_unused_parameters=True)
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    x = torch.randn(32, 12, generator=gen)
    same = torch.arange(32) % 2 * 2.0 - 1
    other = same[:, None] * x + 0.1 * torch.randn(32, 12, generator=gen)
    loss = F.mse_loss(model(x, other), same)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
