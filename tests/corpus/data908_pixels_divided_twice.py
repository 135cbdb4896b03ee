# title: Pixels are divided by 255 in the data set and again in the training loop
# source: constructed
# nproc: 2
# expect.codes: DATA908
# expect.ranks: all
# expect.subject: Conv2d
# expect.step: any
# plain_pytorch: silent
"""Digits drawn as bytes; the fault scales them twice."""
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


def digits(gen, n=24):
    kind = torch.randint(0, 4, (n,), generator=gen)
    image = torch.randint(0, 60, (n, 1, 10, 10), generator=gen)
    for i, k in enumerate(kind):
        image[i, 0, 2 * k : 2 * k + 3] += 180
    return image.float() / 255, kind


torch.manual_seed(26)
model = DDP(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96, 4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    image, kind = digits(gen)
    if FAULT:
        image = image / 255
    loss = F.cross_entropy(model(image), kind)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
