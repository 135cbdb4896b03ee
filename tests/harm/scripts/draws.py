"""What two ranks of one seed draw: by the first argument, in the loop, as samples are loaded, or on purpose."""

import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

what = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
rng = np.random.default_rng(3)


class Data(Dataset):
    def __init__(self):
        self.x = torch.randn(384, 6, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return 384

    def __getitem__(self, i):
        return self.x[i] * (random.uniform(0.9, 1.1) if what == "loading" else 1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Dropout(0.1 if what == "dropout" else 0.0))
        self.head = nn.Linear(16, 6)

    def forward(self, x, level):
        return self.head(self.body(torch.cat([x, level], 1)))


def noisy(x):
    if what in ("torch", "dropout", "by rank"):
        level = torch.rand(len(x), 1)
        return x + level * torch.randn_like(x), level
    if what == "random":
        level = torch.tensor([[random.random()] for _ in x])
        return x + level, level
    if what == "held":
        level = torch.from_numpy(rng.random((len(x), 1))).float()
        return x + level, level
    if what == "purpose":
        if random.random() < 0.5:
            x = x.flip(1)
        return x * float(torch.rand(1)), torch.ones(len(x), 1)
    return x, torch.ones(len(x), 1)


torch.manual_seed(1)
random.seed(1)
model = DDP(Net())
if what == "by rank":
    torch.manual_seed(1 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Data()
for _ in range(3):
    for x in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
        given, level = noisy(x)
        optimizer.zero_grad()
        F.mse_loss(model(given, level), x).backward()
        optimizer.step()
del model
time.sleep(0.3)
dist.destroy_process_group()
