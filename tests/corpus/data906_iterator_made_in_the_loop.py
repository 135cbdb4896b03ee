# title: next(iter(loader)) in the loop gives the first batch every time
# source: constructed
# nproc: 2
# expect.codes: DATA906
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A regression trained by steps instead of epochs; the fault makes the iterator anew in each step."""
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


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


generator = torch.Generator().manual_seed(4)
x = torch.randn(640, 8, generator=generator)
y = x.pow(2).sum(1, keepdim=True).sqrt()
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=20, sampler=sampler)
torch.manual_seed(25)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
stream = endless(loader, sampler)
losses = []
for _ in range(50):
    features, target = next(iter(loader)) if FAULT else next(stream)
    loss = F.mse_loss(model(features), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
