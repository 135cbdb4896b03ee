# title: the samples are sorted by class folder and the distributed sampler does not shuffle
# source: constructed
# nproc: 2
# expect.codes: DATA904
# expect.ranks: all
# expect.step: 0
# plain_pytorch: silent
"""An ImageFolder-like data set."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


class FolderLike(Dataset):
    def __init__(self, per_class=240, classes=4):
        self.samples = [(f"class_{c}/{i:04d}.png", c) for c in range(classes) for i in range(per_class)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        _, c = self.samples[i]
        g = torch.Generator().manual_seed(i)
        img = 0.5 * torch.randn(1, 8, 8, generator=g)
        img[:, 2 * (c // 2) : 2 * (c // 2) + 4, 3 * (c % 2) : 3 * (c % 2) + 4] += 1.0
        return img, c


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(6)
data = FolderLike()
sampler = DistributedSampler(data, shuffle=not FAULT)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 4)))
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for img, label in loader:
        loss = nn.functional.cross_entropy(model(img), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
