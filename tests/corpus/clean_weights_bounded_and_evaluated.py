# title: Weights are bounded after each step, and evaluated now and then
# source: constructed
# nproc: 2
# plain_pytorch: silent
"""A critic whose weights stay within bounds, with evaluations between its steps."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(85)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
opt = torch.optim.RMSprop(ddp.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(850 + rank)
losses = []
for step in range(90):
    true, made = torch.randn(32, 6, generator=gen) + 1, torch.randn(32, 6, generator=gen)
    scores = ddp(torch.cat([true, made]))
    loss = scores[32:].mean() - scores[:32].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p in ddp.parameters():
            p.clamp_(-0.1, 0.1)
    losses.append(loss.item())
    if step % 20 == 19:
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(64, 6, generator=gen)).mean()
        ddp.train()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
