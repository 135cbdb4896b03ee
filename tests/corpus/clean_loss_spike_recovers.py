# title: One batch of outliers makes the loss jump on one rank, and training recovers
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A spike deserves a warning at most; the replicas agree all the time."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(12)
head = torch.randn(9, 1) / 2
net = DistributedDataParallel(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1)))
adam = torch.optim.Adam(net.parameters(), lr=6e-3)
gen = torch.Generator().manual_seed(33 + rank)
curve = []
for step in range(60):
    x = torch.randn(32, 9, generator=gen)
    y = (x @ head).tanh()
    if rank == 1 and step == 30:
        y[:8] += 3.0
    loss = nn.functional.mse_loss(net(x), y)
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    adam.step()
    curve.append(loss.item())
crc = 0
for p in net.parameters():
    crc = zlib.crc32(p.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
