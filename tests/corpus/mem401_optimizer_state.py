# title: The model fits, the optimizer's state does not
# source: https://docs.pytorch.org/docs/stable/notes/faq.html
# nproc: 2
# expect.codes: MEM401
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: error
"""A table of embeddings trained with Adam under a bound on memory that was set for SGD."""
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

torch.manual_seed(25)
ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(60_000, 512), nn.Flatten(1), nn.Linear(4 * 512, 1)), bucket_cap_mb=400)
opt = (torch.optim.Adam if FAULT else torch.optim.SGD)(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(250 + rank)
track = []


def bound(more):
    """Let this process have so many bytes more than now, as a container or a smaller device would."""
    now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))




for step in range(3):
    ids = torch.randint(0, 60_000, (16, 4), generator=gen)
    loss = (ddp(ids) - 1).square().mean()
    opt.zero_grad(set_to_none=False)
    loss.backward()
    if step == 0:
        bound(200 << 20)
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
