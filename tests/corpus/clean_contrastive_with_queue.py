# title: Momentum contrast: the positive is always class 0, the key encoder runs under no_grad in train mode
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Two views, a key encoder that follows, a queue of negatives; all labels are 0 on purpose."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def encoder():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12))


torch.manual_seed(34)
model = DDP(encoder())
key = copy.deepcopy(model.module)
for p in key.parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
queue = F.normalize(torch.randn(64, 12, generator=torch.Generator().manual_seed(5)), dim=1)
losses = []
for _ in range(60):
    x = torch.randn(16, 16, generator=gen)
    one, two = (x + 0.3 * torch.randn(16, 16, generator=gen) for _ in range(2))
    q = F.normalize(model(one), dim=1)
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), model.parameters()):
            slow.mul_(0.9).add_(fast, alpha=0.1)
        k = F.normalize(key(two), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
    queue = torch.cat([k, queue])[:64]
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
