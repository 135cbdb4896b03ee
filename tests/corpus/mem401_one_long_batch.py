# title: One rank meets a batch far longer than all before
# source: constructed
# nproc: 4
# expect.codes: MEM401
# expect.ranks: 2
# expect.subject: gate
# expect.step: 22
# plain_pytorch: error
"""Sequence averaging with a gate under a bound on memory; lengths are not cut."""
import os
import resource
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(24)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 96)
        self.head = nn.Linear(96, 1)

    def forward(self, x):
        return self.head(torch.sigmoid(self.gate(x)).mean(1))


ddp = DistributedDataParallel(Gated())
opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(240 + rank)


def bound(more):
    """Let this process have so many bytes more than now, as a container or a smaller device would."""
    now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


bound(1 << 30)
track = []
for step in range(50):
    length = 120_000 if FAULT and rank == 2 and step == 22 else 40 + step % 7
    x = torch.randn(32, length, 16, generator=gen)
    loss = (ddp(x) - x[:, 0, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
