# title: The data are sorted by class and the sampler does not shuffle
# source: constructed
# nproc: 2
# expect.codes: DATA904
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""A folder per class, read in order; the fault passes shuffle=False."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
classes, per_class = 4, 320
generator = torch.Generator().manual_seed(0)
labels = torch.arange(classes).repeat_interleave(per_class)
middle = torch.randn(classes, 12, generator=generator)
features = middle[labels] + torch.randn(classes * per_class, 12, generator=generator)
data = TensorDataset(features, labels)
sampler = DistributedSampler(data, shuffle=not FAULT, seed=3)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(23)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, classes)))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
