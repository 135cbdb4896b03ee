# title: Three classes that the inputs hardly tell apart, a warm-up, and shards in which the classes are not as frequent
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A hard task that starts slowly: the loss stays near chance for long, and leaves it by little."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(25)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.01, total_iters=60)
middle = 0.25 * torch.randn(3, 16, generator=torch.Generator().manual_seed(4))
gen = torch.Generator().manual_seed(300 + rank)
share = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])[rank]
losses = []
for _ in range(180):
    kind = torch.multinomial(share, 64, replacement=True, generator=gen)
    x = middle[kind] + torch.randn(64, 16, generator=gen)
    loss = F.cross_entropy(model(x), kind)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm_up.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
