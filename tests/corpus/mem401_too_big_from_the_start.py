# title: The batch does not fit, from the first step
# source: constructed
# nproc: 2
# expect.codes: MEM401
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: error
"""A wide network under a bound on memory; the batch size comes from a larger machine."""
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

torch.manual_seed(23)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.SGD(ddp.parameters(), lr=0.01)
gen = torch.Generator().manual_seed(230 + rank)


def bound(more):
    """Let this process have so many bytes more than now, as a container or a smaller device would."""
    now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


bound(1 << 30)
track = []
for step in range(40):
    x = torch.randn(1_500_000 if FAULT else 64, 64, generator=gen)
    loss = (ddp(x) - x[:, :1]).square().mean()
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
