# title: Noise added to the reduced gradients is drawn from each rank's own generator
# source: constructed
# nproc: 2
# expect.codes: SYNC201, SYNC206, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Annealed gradient noise, a known trick for deep nets, done after the all-reduce."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.lin(self.norm(x)))


def add_noise(params, step, generator):
    sigma = 0.02 / (1 + step) ** 0.55
    for p in params:
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=sigma)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(33)
net = nn.Sequential(nn.Linear(7, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 1))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
noise = torch.Generator().manual_seed(rank if FAULT else 0)
data = torch.Generator().manual_seed(10 + rank)
losses = []
for step in range(60):
    x = torch.rand(48, 7, generator=data) * 2 - 1
    y = x[:, :1].abs() + x[:, 1:2] * x[:, 2:3]
    loss = (ddp(x) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    add_noise(ddp.parameters(), step, noise)
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
