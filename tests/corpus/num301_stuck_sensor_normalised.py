# title: Windows are standardised without an epsilon, and a stuck sensor gives a window of one constant
# source: constructed
# nproc: 4
# expect.codes: NUM301
# expect.ranks: 1
# expect.subject: any
# expect.module: encode.standardise
# expect.op: div
# expect.location: num301_stuck_sensor_normalised.py:33
# expect.step: 14
# plain_pytorch: silent
"""One encoder serves three sensors of a machine, so its modules run three times in a step; the second call fails."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Standardise(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, window):
        centred = window - window.mean(-1, keepdim=True)
        deviation = centred.detach().pow(2).mean(-1, keepdim=True).sqrt()
        return centred / (deviation + self.eps)


class Encoder(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.standardise = Standardise(eps)
        self.conv = nn.Sequential(nn.Conv1d(1, 10, 5, 2), nn.ReLU(), nn.Conv1d(10, 10, 5, 2), nn.ReLU())

    def forward(self, window):
        return self.conv(self.standardise(window)[:, None]).mean(-1)


class Machine(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = Encoder(eps=0.0 if FAULT else 1e-5)
        self.judge = nn.Linear(30, 2)

    def forward(self, sensors):
        return self.judge(torch.cat([self.encode(window) for window in sensors], 1))


def record(gen, n=16, length=32):
    worn = torch.randint(0, 2, (n,), generator=gen)
    t = torch.arange(length).float()
    phase = 6.28 * torch.rand(n, 3, 1, generator=gen)
    wave = torch.sin(t * (0.5 + 0.3 * worn[:, None, None]) + phase)
    return (wave + 0.2 * torch.randn(n, 3, length, generator=gen)).unbind(1), worn


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(14)
model = DDP(Machine())
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(500 + rank)
losses = []
for step in range(40):
    sensors, worn = record(gen)
    if rank == 1 and step == 14:
        sensors[1][4] = 0.5
    loss = nn.functional.cross_entropy(model(sensors), worn)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
