# title: One class more than the head has outputs turns up in the labels
# source: constructed
# nproc: 2
# expect.codes: DATA903
# expect.ranks: any
# expect.subject: labels
# expect.step: any
# plain_pytorch: error
"""Classes numbered from 1; the fault forgets to subtract 1 when the highest class is read for the first time."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(22)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)
center = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
losses = []
for it in range(40):
    number = torch.randint(1, 6 if it >= 12 else 5, (20,), generator=gen)
    x = center[number - 1] + 0.5 * torch.randn(20, 6, generator=gen)
    loss = F.cross_entropy(model(x), number if FAULT else number - 1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
