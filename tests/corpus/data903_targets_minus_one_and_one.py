# title: Binary targets are -1 and 1, which binary_cross_entropy_with_logits accepts
# source: constructed
# nproc: 2
# expect.codes: DATA903
# expect.ranks: all
# expect.subject: BinaryCrossEntropyWithLogits
# expect.step: 0
# plain_pytorch: silent
"""Spam filter on hashed features; the fault keeps the labels of a hinge loss."""
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
torch.manual_seed(21)
model = DDP(nn.Linear(40, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)
spam = torch.randn(40, generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(50):
    x = torch.randn(32, 40, generator=gen)
    y = (x @ spam).sign()
    if not FAULT:
        y = (y + 1) / 2
    loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
