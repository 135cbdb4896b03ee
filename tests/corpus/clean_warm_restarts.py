# title: Cosine annealing with warm restarts, averaged weights and a pass that collects their statistics
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Warm restarts per batch; at the end the statistics of the averaged model are collected in train mode."""
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
torch.manual_seed(33)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=10, T_mult=2)
average = torch.optim.swa_utils.AveragedModel(model.module)
gen = torch.Generator().manual_seed(rank)
losses = []


def batch():
    x = torch.randn(32, 10, generator=gen)
    return x, x[:, :2].prod(1, keepdim=True)


for step in range(70):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    losses.append(loss.item())
    if step >= 40:
        average.update_parameters(model.module)
torch.optim.swa_utils.update_bn([batch()[0] for _ in range(8)], average)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
