# title: A sigmoid stands before binary_cross_entropy_with_logits
# source: constructed
# nproc: 2
# expect.codes: RCP802
# expect.ranks: all
# expect.subject: BinaryCrossEntropyWithLogits
# expect.step: 0
# plain_pytorch: silent
"""Multi-label tagging of bags of words; the fault applies the sigmoid twice."""
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
torch.manual_seed(8)
model = DDP(nn.Sequential(nn.EmbeddingBag(60, 24), nn.ReLU(), nn.Linear(24, 7)))
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(rank + 3)
rule = torch.rand(60, 7, generator=torch.Generator().manual_seed(4)) > 0.8
losses = []
for _ in range(45):
    words = torch.randint(0, 60, (32, 6), generator=gen)
    tags = rule[words].any(1).float()
    scores = model(words)
    if FAULT:
        scores = torch.sigmoid(scores)
    loss = F.binary_cross_entropy_with_logits(scores, tags)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
