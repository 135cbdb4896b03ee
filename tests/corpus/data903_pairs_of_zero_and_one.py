# title: Pairs that differ carry a 0 where cosine_embedding_loss wants -1, and are never pushed apart
# source: constructed
# nproc: 2
# expect.codes: DATA903
# expect.ranks: all
# expect.subject: CosineEmbedding
# expect.step: 0
# expect.step_slack: 1
# expect.location: data903_pairs_of_zero_and_one.py:59
# plain_pytorch: silent
"""Embeddings of handwriting by which two samples of one writer are recognised."""
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


class Strokes(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Linear(20, 48), nn.Linear(20, 48)
        self.style = nn.Linear(96, 24)

    def forward(self, x):
        return self.style(torch.cat([self.slow(x).tanh(), self.fast(x).relu()], 1))


WRITERS = torch.randn(9, 20, generator=torch.Generator().manual_seed(3))


def pairs(gen, n=40):
    one, other = torch.randint(0, 9, (2, n), generator=gen)
    other = torch.where(torch.rand(n, generator=gen) < 0.5, one, other)
    sheets = [WRITERS[who] + 0.5 * torch.randn(n, 20, generator=gen) for who in (one, other)]
    return *sheets, one == other


torch.manual_seed(6)
model = DDP(Strokes())
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
gen = torch.Generator().manual_seed(80 + rank)
losses = []
for step in range(80):
    left, right, same = pairs(gen)
    target = same.float() if FAULT else 2 * same.float() - 1
    styles = model(torch.cat([left, right])).chunk(2)
    loss = F.cosine_embedding_loss(*styles, target, margin=0.3)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
